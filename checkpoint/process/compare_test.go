package process

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/testutil"
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
}

// A request that restricts more than its checkpoint, or has other mount points, differs from it.
func TestMountDifferences(t *testing.T) {
	spec := func(change func(*specs.Spec)) *specs.Spec {
		s := &specs.Spec{Root: &specs.Root{}, Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/data", Type: "bind", Source: "/a", Options: []string{"rbind", "rw", "nosuid"}},
			{Destination: "/fixed/", Type: "none", Source: "/b", Options: []string{"bind", "rro"}},
		}, Linux: &specs.Linux{MaskedPaths: []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"}}}
		if change != nil {
			change(s)
		}
		return s
	}
	option := func(at int, name string) func(*specs.Spec) {
		return func(s *specs.Spec) { s.Mounts[at].Options = append(s.Mounts[at].Options, name) }
	}
	for _, test := range []struct {
		name   string
		change func(*specs.Spec)
		want   string // the only difference; empty: none
	}{
		{"same", nil, ""},
		{"another source", func(s *specs.Spec) { s.Mounts[1].Source = "/c" }, ""},
		{"spelling", func(s *specs.Spec) {
			s.Mounts[2] = specs.Mount{Destination: "/fixed", Type: "bind", Source: "/b", Options: []string{"rbind", "ro"}}
		}, ""},
		{"fewer restrictions", func(s *specs.Spec) {
			s.Mounts[1].Options, s.Linux.MaskedPaths, s.Linux.ReadonlyPaths = []string{"rbind"}, nil, nil
		}, ""},
		{"masked instead of read-only", func(s *specs.Spec) { s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, "/proc/sys") },
			"masked path /proc/sys: the checkpoint has none, the request one"},
		{"read-only instead of masked", func(s *specs.Spec) { s.Linux.ReadonlyPaths = []string{"/proc/kcore"} }, ""},
		{"read-only mount", option(1, "ro"), "mount of /data: the checkpoint has no option ro, the request ro"},
		{"read-only tree", option(1, "rro"), "mount of /data: the checkpoint has no option ro, the request ro"},
		{"no programs", option(0, "noexec"), "mount of /proc: the checkpoint has no option noexec, the request noexec"},
		{"no devices", option(2, "nodev"), "mount of /fixed: the checkpoint has no option nodev, the request nodev"},
		{"read-only root", func(s *specs.Spec) { s.Root.Readonly = true },
			"root filesystem: the checkpoint has a writable one, the request a read-only one"},
		{"new mount", func(s *specs.Spec) { s.Mounts = append(s.Mounts, specs.Mount{Destination: "/new", Type: "tmpfs"}) },
			"mount of /new: the checkpoint has none, the request one"},
		{"missing mount", func(s *specs.Spec) { s.Mounts = s.Mounts[1:] }, "mount of /proc: the checkpoint has one, the request none"},
		{"covered", func(s *specs.Spec) {
			s.Mounts = append(s.Mounts, specs.Mount{Destination: "/data", Type: "bind", Options: []string{"bind", "nosuid", "ro"}})
		}, "mount of /data: the checkpoint has no option ro, the request ro"},
		{"other kind", func(s *specs.Spec) {
			s.Mounts[1] = specs.Mount{Destination: "/data", Type: "tmpfs", Options: []string{"nosuid"}}
		}, "mount of /data: the checkpoint has bind, the request tmpfs"},
		{"masked path", func(s *specs.Spec) { s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, "/sys/firmware") },
			"masked path /sys/firmware: the checkpoint has none, the request one"},
		{"read-only path", func(s *specs.Spec) { s.Linux.ReadonlyPaths = append(s.Linux.ReadonlyPaths, "/proc/irq") },
			"read-only path /proc/irq: the checkpoint has none, the request one"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := mountDifferences(spec(nil), spec(test.change))
			if test.want == "" && len(got) > 0 || test.want != "" && !slices.Equal(got, []string{test.want}) {
				t.Errorf("differences %q, want %q", got, test.want)
			}
		})
	}
	if got := mountDifferences(new(specs.Spec), spec(nil)); len(got) != 5 {
		t.Errorf("without mounts: %q", got)
	}
}

// CRIU inherits descriptors of libcontainer by their position in the list of streams. Only the
// first three belong to the container.
func TestCheckStreams(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(archive.ImagesDir, archive.DescriptorsFile)
	putJSON(t, dir, name, []string{"/dev/null", "pipe:[1]", "pipe:[2]"})
	testutil.Must(t, checkStreams(dir))
	for _, bad := range [][]string{nil, {"pipe:[1]", "pipe:[2]"}, {"pipe:[1]", "pipe:[2]", "pipe:[3]", "pipe:[4]"}} {
		putJSON(t, dir, name, bad)
		if err := checkStreams(dir); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// The rights of a saved container, and the mounts of a saved sandbox, must be those of the request.
func TestRightsAndSandboxDifferences(t *testing.T) {
	t.Parallel()
	spec := func(change func(*specs.Spec)) *specs.Spec {
		s := &specs.Spec{
			Process: &specs.Process{NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}},
			Mounts:  []specs.Mount{{Destination: "/a", Source: "/x", Type: "bind", Options: []string{"rbind", "ro"}}, {Destination: "/proc"}},
			Linux:   &specs.Linux{Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}},
		}
		change(s)
		return s
	}
	for _, test := range []struct {
		name   string
		change func(*specs.Spec)
		want   string
	}{
		{"same", func(*specs.Spec) {}, ""},
		{"source and order of options", func(s *specs.Spec) {
			s.Mounts[0].Source, s.Mounts[0].Options = "/y", []string{"ro", "rbind"}
		}, ""},
		{"no_new_privs", func(s *specs.Spec) { s.Process.NoNewPrivileges = false }, "no_new_privs"},
		{"capabilities", func(s *specs.Spec) { s.Process.Capabilities.Bounding = nil }, "capabilities"},
		{"no capabilities", func(s *specs.Spec) { s.Process.Capabilities = nil }, "capabilities"},
		{"seccomp", func(s *specs.Spec) { s.Linux.Seccomp.DefaultAction = specs.ActAllow }, "seccomp"},
		{"no seccomp", func(s *specs.Spec) { s.Linux.Seccomp = nil }, "seccomp"},
		{"options", func(s *specs.Spec) { s.Mounts[0].Options = []string{"rbind", "rw"} }, "mount at /a"},
		{"missing mount", func(s *specs.Spec) { s.Mounts = s.Mounts[:1] }, "mount at /proc"},
		{"additional mount", func(s *specs.Spec) { s.Mounts = append(s.Mounts, specs.Mount{Destination: "/b"}) }, "mount at /b"},
	} {
		saved, request := spec(func(*specs.Spec) {}), spec(test.change)
		got := append(rightsDifferences(saved, request), sandboxMountDifferences(saved.Mounts, request.Mounts)...)
		if test.want == "" && len(got) > 0 || test.want != "" && (len(got) != 1 || !strings.Contains(got[0], test.want)) {
			t.Errorf("%s: %q", test.name, got)
		}
	}
	if got := rightsDifferences(&specs.Spec{}, spec(func(*specs.Spec) {})); len(got) != 1 {
		t.Errorf("an empty spec: %q", got)
	}
}

func putJSON(t *testing.T, dir, name string, content any) {
	t.Helper()
	data, err := json.Marshal(content)
	testutil.Must(t, err)
	path := filepath.Join(dir, name)
	testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	testutil.Must(t, os.WriteFile(path, data, 0o600))
}
