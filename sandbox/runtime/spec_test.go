package runtime

import (
	"context"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/testutil"
	"berth/oci"
	"berth/oci/users"
	"berth/sandbox/handler"
	"berth/sandbox/state"
	"berth/shim/ociruntime"
)

// fakeProfiles have a problem with the default AppArmor profile, unless that is empty.
type fakeProfiles struct {
	problem string
	during  func() // called by Ensure; may be nil
}

func (p fakeProfiles) Ensure(context.Context) {
	if p.during != nil {
		p.during()
	}
}

func (p fakeProfiles) Problem() string { return p.problem }

// No request gets a lower oom_score_adj than the node permits.
func TestRaiseOOMScore(t *testing.T) {
	for _, test := range []struct{ want, least, got int }{
		{0, -1000, 0}, {-997, -1000, -997}, {1000, -1000, 1000}, {-997, 0, 0}, {-997, -500, -500}, {3, 100, 100},
	} {
		p := &specs.Process{OOMScoreAdj: &test.want}
		raiseOOMScore(p, host.Facts{OOMScoreAdjMin: test.least})
		if *p.OOMScoreAdj != test.got {
			t.Errorf("%d with minimum %d: got %d, want %d", test.want, test.least, *p.OOMScoreAdj, test.got)
		}
	}
	raiseOOMScore(new(specs.Process), host.Facts{}) // without a score nothing is set
}

// A pod has a private shm unless it uses the node's IPC namespace. It has a user namespace only if
// it requests one.
func TestPodForSpecs(t *testing.T) {
	n := state.Node{Dirs: state.Dirs{Root: "/root", State: "/state"}}
	users := func(mode runtimeapi.NamespaceMode) *runtimeapi.UserNamespace {
		mapping := []*runtimeapi.IDMapping{{HostId: 65536, Length: 65536}}
		return &runtimeapi.UserNamespace{Mode: mode, Uids: mapping, Gids: mapping}
	}
	for name, test := range map[string]struct {
		options     *runtimeapi.NamespaceOption
		shm, userns string
	}{
		"usual":            {nil, "/state/pods/p/tmpfs/shm", ""},
		"node's IPC":       {&runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}, "/dev/shm", ""},
		"user namespace":   {&runtimeapi.NamespaceOption{UsernsOptions: users(runtimeapi.NamespaceMode_POD)}, "/state/pods/p/tmpfs/shm", "/state/pods/p/userns"},
		"the node's users": {&runtimeapi.NamespaceOption{UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}}, "/state/pods/p/tmpfs/shm", ""},
	} {
		config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/kubepods/p",
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: test.options}}}
		mappings, err := oci.UserNamespace(config)
		testutil.Must(t, err)
		got := podOf(n, &state.Pod{PodSpec: &state.PodSpec{ID: "p", Config: config, NetNS: "/netns/p", Tmpfs: true, Mappings: mappings}, PodStatus: state.PodStatus{PausePID: 7}})
		if got.Shm != test.shm || got.UserNS != test.userns {
			t.Errorf("%s: shm %s, user namespace %q", name, got.Shm, got.UserNS)
		}
		const etc = "/state/pods/p/tmpfs/etc/"
		if got.ResolvConf != etc+"resolv.conf" || got.Hosts != etc+"hosts" || got.Hostname != etc+"hostname" || !got.OwnsFiles ||
			got.NetNS != "/netns/p" || got.PausePID != 7 || got.CgroupParent != "/kubepods/p" {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A pod of version 0.2.0 keeps its files at their old paths.
func TestPodOfEarlierVersion(t *testing.T) {
	n := state.Node{Dirs: state.Dirs{Root: "/root", State: "/state"}}
	got := podOf(n, &state.Pod{PodSpec: &state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{}}})
	const etc = "/root/sandboxes/p/"
	if got.Shm != "/state/pods/p/shm" || got.ResolvConf != etc+"resolv.conf" || got.Hosts != etc+"hosts" || got.Hostname != etc+"hostname" || got.OwnsFiles {
		t.Errorf("%+v", got)
	}
}

// The pause's CPUs are not those of a sandbox, which runs all containers of its pod.
func TestPauseCPUs(t *testing.T) {
	k := testLauncher()
	k.Node.PauseCPUs = "0-1"
	for name, test := range map[string]struct {
		runtime *handler.Runtime
		want    string
	}{
		"libcontainer": {nil, "0-1"},
		"runtime":      {&handler.Runtime{}, "0-1"},
		"sandboxed":    {&handler.Runtime{Runtime: ociruntime.Runtime{Sandboxed: true}}, ""},
	} {
		config := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "p"}}
		spec, err := k.pauseSpec(t.Context(), &state.Pod{PodSpec: &state.PodSpec{ID: "p", Config: config, NetNS: "/netns/p", Runtime: test.runtime}}, users.User{}, nil)
		testutil.Must(t, err)
		if got := spec.Linux.Resources.CPU.Cpus; got != test.want {
			t.Errorf("%s: CPUs %q", name, got)
		}
	}
}

// A pod gets the features that both the host and its runtime support.
func TestFacts(t *testing.T) {
	facts := host.Facts{RecursiveReadOnly: true}
	k := Launcher{Node: state.Node{Host: facts}, AppArmor: fakeProfiles{problem: "no parser"}}
	for name, test := range map[string]struct {
		runtime *handler.Runtime
		want    bool
	}{"libcontainer": {nil, true}, "runtime with feature": {&handler.Runtime{RecursiveReadOnly: true}, true}, "runtime without feature": {&handler.Runtime{}, false}} {
		if got := k.facts(t.Context(), &state.Pod{PodSpec: &state.PodSpec{Runtime: test.runtime}}); got.RecursiveReadOnly != test.want || got.NoAppArmorProfile != "no parser" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	k.Node.Host.RecursiveReadOnly = false
	if k.facts(t.Context(), &state.Pod{PodSpec: &state.PodSpec{Runtime: &handler.Runtime{RecursiveReadOnly: true}}}).RecursiveReadOnly {
		t.Error("a feature is offered that the host lacks")
	}
}

// Other runtimes do not make writable mounts of cgroups for unprivileged containers.
func TestCgroupsOfOtherRuntimes(t *testing.T) {
	k := Launcher{AppArmor: fakeProfiles{}}
	asked := &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{CgroupnsOptions: &runtimeapi.CgroupNamespace{}}}
	writable := &runtimeapi.LinuxContainerSecurityContext{CgroupMountMode: runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE}
	for name, test := range map[string]struct {
		runtime *handler.Runtime
		sc      *runtimeapi.LinuxContainerSecurityContext
		refused bool
	}{
		"nothing":              {&handler.Runtime{}, nil, false},
		"namespace":            {&handler.Runtime{CgroupNamespaces: true}, asked, false},
		"no namespace":         {&handler.Runtime{}, asked, true},
		"writable":             {&handler.Runtime{CgroupNamespaces: true}, writable, true},
		"writable, own launch": {nil, writable, false},
	} {
		_, err := k.cgroupFacts(t.Context(), &state.Pod{PodSpec: &state.PodSpec{Runtime: test.runtime}}, test.sc)
		if (status.Code(err) == codes.FailedPrecondition) != test.refused || (err != nil) != test.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The CDIDevices field requests CDI devices. Annotations cannot (CVE-2026-53492).
func TestCDIDevices(t *testing.T) {
	config := &runtimeapi.ContainerConfig{Annotations: map[string]string{"cdi.k8s.io/x": "vendor.example/dev=evil"},
		CDIDevices: []*runtimeapi.CDIDevice{{Name: "vendor.example/dev=1"}, {Name: "vendor.example/dev=2"}}}
	if got := cdiDevices(config); len(got) != 2 || got[0] != "vendor.example/dev=1" || got[1] != "vendor.example/dev=2" {
		t.Errorf("%q", got)
	}
}

// ForPlugins omits the seccomp filter and does not modify the launched spec.
func TestForPlugins(t *testing.T) {
	spec := &specs.Spec{Process: &specs.Process{}, Mounts: []specs.Mount{{Destination: "/m"}}, Hooks: &specs.Hooks{},
		Linux: &specs.Linux{Seccomp: &specs.LinuxSeccomp{}, CgroupsPath: "/c"}}
	got := ForPlugins(spec)
	if got.Linux.Seccomp != nil || got.Process != nil || got.Linux.CgroupsPath != "/c" || len(got.Mounts) != 1 || got.Hooks != spec.Hooks {
		t.Errorf("%+v, %+v", got, got.Linux)
	}
	if spec.Linux.Seccomp == nil {
		t.Error("the launched spec lost its filter")
	}
}
