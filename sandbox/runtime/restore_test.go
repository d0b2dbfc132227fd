package runtime

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/archive"
	"berth/checkpoint/verify"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/shim/proto"
)

func TestProcessDifferences(t *testing.T) {
	process := func(change func(*specs.Process)) *specs.Process {
		p := &specs.Process{Args: []string{"a", "b"}, Cwd: "/", Env: []string{"A=1", "HOSTNAME=x", "B=2"},
			User: specs.User{UID: 1, GID: 2, AdditionalGids: []uint32{4, 3}}}
		if change != nil {
			change(p)
		}
		return p
	}
	for _, test := range []struct {
		name   string
		change func(*specs.Process)
		want   string // of the only difference; empty: none
	}{
		{"same", nil, ""},
		{"order", func(p *specs.Process) {
			p.Env, p.User.AdditionalGids = []string{"B=2", "A=1"}, []uint32{3, 4, 4}
		}, ""},
		{"own variable", func(p *specs.Process) { p.Env[1] = "HOSTNAME=y" }, ""},
		{"command", func(p *specs.Process) { p.Args = p.Args[:1] }, "command"},
		{"directory", func(p *specs.Process) { p.Cwd = "/tmp" }, "working directory"},
		{"value", func(p *specs.Process) { p.Env[0] = "A=secret" }, "environment variable A differs"},
		{"missing variable", func(p *specs.Process) { p.Env = p.Env[1:] }, "environment variable A differs"},
		{"new variable", func(p *specs.Process) { p.Env = append(p.Env, "C=secret") }, "environment variable C is not in"},
		{"user", func(p *specs.Process) { p.User.UID = 0 }, "user"},
		{"group", func(p *specs.Process) { p.User.GID = 0 }, "user"},
		{"groups", func(p *specs.Process) { p.User.AdditionalGids = nil }, "supplementary groups"},
		{"terminal", func(p *specs.Process) { p.Terminal = true }, "terminal"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := processDifferences(process(nil), process(test.change))
			if test.want == "" && len(got) > 0 || test.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], test.want)) {
				t.Errorf("differences %q, want %q", got, test.want)
			}
			if strings.Contains(strings.Join(got, ""), "secret") {
				t.Errorf("differences show a value: %q", got)
			}
		})
	}
	if got := processDifferences(nil, process(nil)); len(got) != 1 {
		t.Errorf("without a process: %q", got)
	}
}

func writeJSON(t *testing.T, dir, name string, content any) {
	t.Helper()
	data, err := json.Marshal(content)
	testutil.Must(t, err)
	path := filepath.Join(dir, name)
	testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	testutil.Must(t, os.WriteFile(path, data, 0o600))
}

// A checkpoint of another node is compared with each filter that a launcher could load, its limits and
// the paths that this kernel lacks.
func TestExpectations(t *testing.T) {
	limit := int64(1 << 20)
	spec := &specs.Spec{Linux: &specs.Linux{
		Seccomp:     &specs.LinuxSeccomp{DefaultAction: specs.ActAllow},
		MaskedPaths: []string{"/proc/no-such-file", "/proc/version"}, ReadonlyPaths: []string{"/sys/no-such-file"},
		Resources: &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}},
	}}
	rlimits := []specs.POSIXRlimit{{Type: "RLIMIT_CORE", Hard: 7}}
	for _, filters := range [][][]byte{nil, {[]byte("a")}, {[]byte("a"), []byte("b")}} {
		all, err := expectations(spec, &proto.Inspected{Seccomp: filters, Rlimits: rlimits})
		testutil.Must(t, err)
		if len(all) != max(1, len(filters)) {
			t.Fatalf("%d expectations for %d filters", len(all), len(filters))
		}
		for i, e := range all {
			if len(filters) == 0 && (e.Spec.Linux.Seccomp != nil || e.Seccomp != nil) {
				t.Errorf("without a filter: %+v", e)
			}
			if len(filters) > 0 && (e.Spec.Linux.Seccomp == nil || !bytes.Equal(e.Seccomp, filters[i])) {
				t.Errorf("filter %d: %q", i, e.Seccomp)
			}
			if len(e.Cgroups) == 0 || e.UnprivilegedPort == 0 {
				t.Errorf("cgroups %q, ports from %d", e.Cgroups, e.UnprivilegedPort)
			}
			if !slices.Equal(e.Rlimits, rlimits) || e.Memory != limit || !slices.Equal(e.ExternalFiles, []string{NullStream}) ||
				!slices.Equal(e.AbsentPaths, []string{"/proc/no-such-file", "/sys/no-such-file"}) {
				t.Errorf("%+v", e)
			}
		}
	}
	if spec.Linux.Seccomp == nil {
		t.Error("the spec was changed")
	}
}

// The files of another node's checkpoint must be a tar without privileged files, or be missing.
func TestCompareFiles(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, compareFiles(filepath.Join(dir, "missing"), verify.Shm))
	for name, h := range map[string]*tar.Header{
		"ordinary": {Name: "f", Typeflag: tar.TypeReg, Mode: 0o600}, "set-id": {Name: "f", Typeflag: tar.TypeReg, Mode: 0o4755}, "none": nil,
	} {
		var data bytes.Buffer
		w := tar.NewWriter(&data)
		code := codes.OK
		switch name {
		case "none":
			data.WriteString("this is not a tar")
			code = codes.InvalidArgument
		case "set-id":
			code = codes.FailedPrecondition
			fallthrough
		default:
			testutil.Must(t, w.WriteHeader(h))
			testutil.Must(t, w.Close())
		}
		path := filepath.Join(dir, name)
		testutil.Must(t, os.WriteFile(path, data.Bytes(), 0o600))
		if err := compareFiles(path, verify.Shm); errdefs.Code(err) != code {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The deleted files of a checkpoint become whiteouts. Another tar can follow them.
func TestWhiteouts(t *testing.T) {
	dir := t.TempDir()
	none, err := whiteouts(dir)
	testutil.Must(t, err)
	if content, err := io.ReadAll(none); len(content) > 0 || err != nil {
		t.Errorf("without a list: %q, %v", content, err)
	}
	writeJSON(t, dir, archive.DeletedFilesFile, []string{"/etc/passwd", "top", "/../up/../../x/./y", "/var/.wh..wh..opq"})
	list, err := whiteouts(dir)
	testutil.Must(t, err)
	var more bytes.Buffer
	w := tar.NewWriter(&more)
	testutil.Must(t, w.WriteHeader(&tar.Header{Name: "more", Typeflag: tar.TypeReg}))
	testutil.Must(t, w.Close())
	var names []string
	r := tar.NewReader(io.MultiReader(list, &more))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		testutil.Must(t, err)
		names = append(names, h.Name)
	}
	want := []string{"etc/.wh.passwd", ".wh.top", "x/.wh.y", "var/.wh..wh..opq", "more"}
	if !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
	for _, bad := range []any{[]string{"/"}, []string{"a/.."}, "text", []int{1}, make([]string, maxDeleted+1)} {
		writeJSON(t, dir, archive.DeletedFilesFile, bad)
		if got, err := whiteouts(dir); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%.100v: %v, %v", bad, got, err)
		}
	}
}

// CRIU inherits descriptors of libcontainer by their position in the list of streams. Only the first
// three belong to the container.
func TestCheckStreams(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(archive.ImagesDir, archive.DescriptorsFile)
	writeJSON(t, dir, name, []string{"/dev/null", "pipe:[1]", "pipe:[2]"})
	testutil.Must(t, checkStreams(dir))
	for _, bad := range [][]string{nil, {"pipe:[1]", "pipe:[2]"}, {"pipe:[1]", "pipe:[2]", "pipe:[3]", "pipe:[4]"}} {
		writeJSON(t, dir, name, bad)
		if err := checkStreams(dir); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// The ID of the image comes from the signed manifest, else from the file that other programs write.
func TestImageOf(t *testing.T) {
	hex := strings.Repeat("ab", 32)
	signed := &archive.Archive{Manifest: archive.Manifest{Pod: &archive.Pod{},
		Containers: []archive.Container{{Name: "a", Image: archive.Image{ID: "sha256:" + hex}}, {Name: "b"}}}}
	for _, test := range []struct {
		name, ref, want string
	}{
		{"a", "", "sha256:" + hex},
		{"b", hex, "sha256:" + hex},
		{"b", "sha256:" + hex, "sha256:" + hex},
		{"b", "busybox:latest", ""},
		{"b", "", ""},
	} {
		t.Run(test.name+" "+test.ref, func(t *testing.T) {
			dir := t.TempDir()
			writeJSON(t, dir, archive.ConfigFile, map[string]string{"rootfsImageRef": test.ref})
			got, err := imageOf(signed, test.name, dir)
			if got != test.want || (err == nil) != (test.want != "") {
				t.Errorf("image %q, %v", got, err)
			}
		})
	}
}
