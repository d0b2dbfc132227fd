package runtime

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

const vendorSpec = `{"cdiVersion": "0.7.0", "kind": "vendor.example/dev",
"containerEdits": {"env": ["VENDOR=all"]},
"devices": [
	{"name": "a", "containerEdits": {
		"env": ["DEVICE=a"], "additionalGids": [777],
		"deviceNodes": [{"path": "/dev/vendor-a", "type": "c", "major": 1, "minor": 3, "permissions": "rw"}],
		"mounts": [{"hostPath": "/usr/lib/vendor", "containerPath": "/lib/vendor", "options": ["ro", "bind"]}],
		"hooks": [{"hookName": "createContainer", "path": "/bin/true", "args": ["true"]}]}},
	{"name": "late", "containerEdits": {"hooks": [{"hookName": "poststop", "path": "/bin/true"}]}}
]}`

// dirsWith returns spec directories with the given files in the first one.
func dirsWith(t *testing.T, files map[string]string) CDIDirs {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return CDIDirs{dir, filepath.Join(dir, "missing")}
}

func newSpec() *specs.Spec {
	return &specs.Spec{Process: &specs.Process{Env: []string{"PATH=/bin"}}, Linux: &specs.Linux{}}
}

func TestInject(t *testing.T) {
	t.Parallel()
	dirs := dirsWith(t, map[string]string{"vendor.json": vendorSpec, "broken.json": "{", "notes.txt": "{"})
	spec := newSpec()
	testutil.Must(t, dirs.Inject(spec, []string{"vendor.example/dev=a", "vendor.example/dev=a"}))
	if want := []string{"PATH=/bin", "VENDOR=all", "DEVICE=a"}; !slices.Equal(spec.Process.Env, want) {
		t.Errorf("environment: %q", spec.Process.Env)
	}
	if !slices.Equal(spec.Process.User.AdditionalGids, []uint32{777}) {
		t.Errorf("groups: %v", spec.Process.User.AdditionalGids)
	}
	if d := spec.Linux.Devices; len(d) != 1 || d[0].Path != "/dev/vendor-a" || d[0].Minor != 3 {
		t.Errorf("nodes: %+v", d)
	}
	if r := spec.Linux.Resources.Devices; len(r) != 1 || !r[0].Allow || r[0].Access != "rw" || *r[0].Minor != 3 {
		t.Errorf("rules: %+v", r)
	}
	if m := spec.Mounts; len(m) != 1 || m[0].Destination != "/lib/vendor" {
		t.Errorf("mounts: %+v", m)
	}
	if h := spec.Hooks; h == nil || len(h.CreateContainer) != 1 {
		t.Errorf("hooks: %+v", h)
	}
}

// Each call reads the files again.
func TestInjectSeesChanges(t *testing.T) {
	t.Parallel()
	dirs := dirsWith(t, nil)
	names := []string{"vendor.example/dev=a"}
	if err := dirs.Inject(newSpec(), names); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("before the file exists: %v", err)
	}
	file := filepath.Join(dirs[0], "vendor.json")
	testutil.Must(t, os.WriteFile(file, []byte(vendorSpec), 0o600))
	testutil.Must(t, dirs.Inject(newSpec(), names))
	testutil.Must(t, os.Remove(file))
	if err := dirs.Inject(newSpec(), names); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("after the file was removed: %v", err)
	}
}

func TestInjectRefused(t *testing.T) {
	t.Parallel()
	dirs := dirsWith(t, map[string]string{"vendor.json": vendorSpec, "broken.json": "{"})
	for _, test := range []struct {
		device string
		code   codes.Code
		says   string
	}{
		{"vendor.example/dev=b", codes.FailedPrecondition, "vendor.example/dev=b: not found"},
		{"vendor.example/dev=b", codes.FailedPrecondition, "with errors: " + filepath.Join(dirs[0], "broken.json")},
		{"a", codes.InvalidArgument, `"a"`},
		{"", codes.InvalidArgument, `""`},
		{"vendor.example/dev=", codes.InvalidArgument, "vendor.example/dev="},
		{"vendor.example/dev=late", codes.Unimplemented, "poststop"},
	} {
		t.Run(test.device+" "+test.code.String(), func(t *testing.T) {
			err := dirs.Inject(newSpec(), []string{"vendor.example/dev=a", test.device})
			if errdefs.Code(err) != test.code || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %v with %q", err, test.code, test.says)
			}
		})
	}
	if err := dirs.Inject(nil, nil); err != nil {
		t.Errorf("no devices: %v", err)
	}
}

func TestHostPaths(t *testing.T) {
	t.Parallel()
	dirs := dirsWith(t, map[string]string{"vendor.json": `{"cdiVersion": "0.7.0", "kind": "vendor.example/dev",
		"containerEdits": {"deviceNodes": [{"path": "/dev/control"}]},
		"devices": [{"name": "a", "containerEdits": {"deviceNodes": [{"path": "/dev/vendor0", "hostPath": "/run/driver/dev/real0"}]}}]}`})
	paths, err := dirs.HostPaths([]string{"vendor.example/dev=a", "vendor.example/dev=missing"})
	if err != nil || !slices.Equal(paths, []string{"/run/driver/dev/real0", "/dev/control"}) {
		t.Errorf("got %q, %v", paths, err)
	}
}
