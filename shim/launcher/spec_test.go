package launcher

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/shim/ociruntime"
	"berth/shim/proto"
)

func TestNewProcess(t *testing.T) {
	got, err := newProcess(&specs.Process{
		Args: []string{"sh", "-c", "true"}, Env: []string{"A=b"}, Cwd: "/work", NoNewPrivileges: true, SelinuxLabel: "label", ApparmorProfile: "profile",
		User:         specs.User{UID: 7, GID: 8, AdditionalGids: []uint32{9, 10}},
		ConsoleSize:  &specs.Box{Width: 80, Height: 24},
		Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}, Effective: []string{"CAP_CHOWN"}, Ambient: []string{"CAP_SYS_TIME"}},
		Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 20, Soft: 10}},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := configs.Capabilities{Bounding: []string{"CAP_KILL"}, Effective: []string{"CAP_CHOWN"}, Ambient: []string{"CAP_SYS_TIME"}}
	switch {
	case !reflect.DeepEqual(got.Args, []string{"sh", "-c", "true"}), !reflect.DeepEqual(got.Env, []string{"A=b"}), got.Cwd != "/work":
		t.Errorf("it would run %q in %s with %q", got.Args, got.Cwd, got.Env)
	case got.UID != 7, got.GID != 8, !reflect.DeepEqual(got.AdditionalGroups, []int{9, 10}):
		t.Errorf("it would run as %d:%d, %v", got.UID, got.GID, got.AdditionalGroups)
	case !*got.NoNewPrivileges, got.Label != "label", got.AppArmorProfile != "profile", !reflect.DeepEqual(*got.Capabilities, want):
		t.Errorf("it would be confined by %+v, %+v", got, got.Capabilities)
	case got.ConsoleWidth != 80, got.ConsoleHeight != 24:
		t.Errorf("its terminal would have %dx%d characters", got.ConsoleWidth, got.ConsoleHeight)
	case !reflect.DeepEqual(got.Rlimits, []configs.Rlimit{{Type: unix.RLIMIT_NOFILE, Hard: 20, Soft: 10}}):
		t.Errorf("its limits would be %+v", got.Rlimits)
	}
}

// Both makers refuse what can't be run, before anything is made.
func TestBackendsRefuseInvalidProcesses(t *testing.T) {
	for name, p := range map[string]*specs.Process{
		"no command":           {},
		"a limit of no kernel": {Args: []string{"true"}, Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_PATIENCE"}}},
	} {
		_, library := newProcess(p)
		program := (&ociBackend{launch: &launch{Launch: &proto.Launch{Spec: &specs.Spec{Process: p}}}}).prepare()
		for maker, err := range map[string]error{"libcontainer": library, "program": program} {
			var refused *proto.Error
			if !errors.As(err, &refused) || refused.Code != proto.InvalidArgument {
				t.Errorf("%s, %s: %v", maker, name, err)
			}
		}
	}
	if _, err := newProcess(nil); err == nil {
		t.Error("no process at all is no error")
	}
}

func TestWithoutMappings(t *testing.T) {
	spec := func(path string) *specs.Spec {
		return &specs.Spec{Hostname: "ship", Linux: &specs.Linux{CgroupsPath: "/c", UIDMappings: []specs.LinuxIDMapping{{Size: 1}}, GIDMappings: []specs.LinuxIDMapping{{Size: 1}},
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace, Path: "/p"}, {Type: specs.UserNamespace, Path: path}}}}
	}
	joins, makes := spec("/run/userns"), spec("")
	got := withoutMappings(joins)
	if got.Linux.UIDMappings != nil || got.Linux.GIDMappings != nil || got.Hostname != "ship" || got.Linux.CgroupsPath != "/c" {
		t.Errorf("joining: %+v, %+v", got, got.Linux)
	}
	if len(joins.Linux.UIDMappings) != 1 || len(joins.Linux.GIDMappings) != 1 {
		t.Error("the request's spec was changed")
	}
	if withoutMappings(makes) != makes {
		t.Error("a user namespace that is made needs its mappings")
	}
}

func TestHostID(t *testing.T) {
	for name, test := range map[string]struct {
		mappings []specs.LinuxIDMapping
		want     int
		fails    bool
	}{
		"the host's":         {nil, 0, false},
		"mapped":             {[]specs.LinuxIDMapping{{ContainerID: 0, HostID: 65536, Size: 65536}}, 65536, false},
		"in another mapping": {[]specs.LinuxIDMapping{{ContainerID: 1, HostID: 7, Size: 9}, {ContainerID: 0, HostID: 5, Size: 1}}, 5, false},
		"empty":              {[]specs.LinuxIDMapping{{ContainerID: 0, HostID: 5}}, 0, true},
		"not mapped":         {[]specs.LinuxIDMapping{{ContainerID: 1, HostID: 7, Size: 9}}, 0, true},
	} {
		if got, err := hostID(test.mappings); got != test.want || (err != nil) != test.fails {
			t.Errorf("%s: %d, %v", name, got, err)
		}
	}
}

// A PID namespace decides whether the monitor gets a container's orphans, and whether the kernel
// kills its processes with its init.
func TestPIDNamespaces(t *testing.T) {
	own, pods := specs.LinuxNamespace{Type: specs.PIDNamespace}, specs.LinuxNamespace{Type: specs.PIDNamespace, Path: "/proc/7/ns/pid"}
	for name, test := range map[string]struct {
		namespaces        []specs.LinuxNamespace
		pause             proto.PauseKind
		inherits, private bool
	}{
		"its own":         {[]specs.LinuxNamespace{own}, "", false, true},
		"the pod's":       {[]specs.LinuxNamespace{pods}, "", false, false},
		"the host's":      {[]specs.LinuxNamespace{{Type: specs.UTSNamespace}}, "", true, false},
		"a pause's":       {[]specs.LinuxNamespace{own}, proto.PlainPause, false, true},
		"the host's, too": {nil, proto.PlainPause, false, false},
	} {
		c := &launch{Launch: &proto.Launch{Pause: test.pause, Spec: &specs.Spec{Linux: &specs.Linux{Namespaces: test.namespaces}}}}
		if c.inheritsOrphans() != test.inherits || c.privatePIDs() != test.private {
			t.Errorf("%s: inherits %t, private %t", name, c.inheritsOrphans(), c.privatePIDs())
		}
	}
}

// Links of an image are resolved inside the image. The mounted path contains no link.
func TestResolveSubPath(t *testing.T) {
	place, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []error{
		os.MkdirAll(filepath.Join(place, "data/deep"), 0o755), os.MkdirAll(filepath.Join(place, "etc"), 0o755),
		os.Symlink("/data", filepath.Join(place, "absolute")), os.Symlink("../../../../etc", filepath.Join(place, "data/up")),
		os.Symlink("loop", filepath.Join(place, "loop")),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	for sub, want := range map[string]string{"": "", "data": "/data", "absolute/deep": "/data/deep", "data/up": "/etc", "../data": "/data"} {
		if got, err := resolveSubPath(proto.Volume{Path: place, SubPath: sub}); got != place+want || err != nil {
			t.Errorf("%q: %s, %v; want %s", sub, got, err, place+want)
		}
	}
	for _, sub := range []string{"none", "loop", "data/none"} {
		if got, err := resolveSubPath(proto.Volume{Path: place, SubPath: sub}); err == nil {
			t.Errorf("%q is %s", sub, got)
		}
	}
}

// An OCI runtime's error about the command is InvalidArgument and names the command. Others stay
// unchanged.
func TestNameCommand(t *testing.T) {
	p := &specs.Process{Args: []string{"no-such-command", "argument"}}
	named := nameCommand(p, &ociruntime.Error{Message: "executable file `no-such-command` not found in $PATH"})
	if got := toReply(named); got.Code != proto.InvalidArgument || got.Message[:24] != `command "no-such-command` {
		t.Errorf("%d, %q", got.Code, got.Message)
	}
	if other := errors.New("no space left on device"); nameCommand(p, other) != other {
		t.Errorf("%v", nameCommand(p, other))
	}
}

// An exec has a cgroup below the container's freezer or pids cgroup, or none.
func TestMakeExecCgroup(t *testing.T) {
	dir := t.TempDir()
	groups := map[string]string{"": dir, "freezer": dir, "pids": dir}
	made, _ := makeExecCgroup(groups, "1")
	if made != filepath.Join(dir, "exec-1") {
		t.Errorf("the cgroup is %q", made)
	}
	if again, _ := makeExecCgroup(groups, "1"); again != "" {
		t.Errorf("another exec's cgroup is taken: %q", again)
	}
	if none, hierarchy := makeExecCgroup(map[string]string{"memory": dir}, "2"); none != "" || hierarchy != "" {
		t.Errorf("without a hierarchy to find processes in: %q, %q", none, hierarchy)
	}
}

func TestExitCode(t *testing.T) {
	run := func(script string) *os.ProcessState {
		cmd := exec.Command("sh", "-c", script)
		_ = cmd.Run() // the state holds the result
		return cmd.ProcessState
	}
	for script, want := range map[string]int32{"exit 0": 0, "exit 7": 7, "kill -TERM $$": 143, "kill -KILL $$": 137} {
		if got := exitCode(run(script), nil); got != want {
			t.Errorf("%s: %d, want %d", script, got, want)
		}
	}
	if got := exitCode(nil, errors.New("lost")); got != 255 {
		t.Errorf("a process that was lost: %d", got)
	}
}
