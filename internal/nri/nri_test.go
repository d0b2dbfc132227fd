package nri

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func testSpec() *specs.Spec {
	score := 100
	return &specs.Spec{
		Root:    &specs.Root{},
		Process: &specs.Process{Args: []string{"sh"}, Env: []string{"PATH=/bin", "KEEP=1", "DROP=1"}, Cwd: "/", OOMScoreAdj: &score, User: specs.User{UID: 5, GID: 6}},
		Mounts:  []specs.Mount{{Destination: "/proc", Type: "proc"}, {Destination: "/a/b", Type: "tmpfs"}, {Destination: "/gone", Type: "tmpfs"}},
		Linux: &specs.Linux{Resources: &specs.LinuxResources{}, Sysctl: map[string]string{"net.x": "1", "net.y": "2"},
			Devices:    []specs.LinuxDevice{{Path: "/dev/old", Type: "c"}, {Path: "/dev/same", Type: "c", Major: 1}},
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace, Path: "/run/netns/x"}}},
	}
}

var testNode = Node{Sysctl: func(name, value string) (string, error) {
	if value == "bad" {
		return "", errdefs.InvalidArgument("sysctl %s", name)
	}
	return strings.ReplaceAll(name, "/", "."), nil
}}

// apply checks an adjustment, writes and reads its record, and applies it, as the daemon does.
func apply(t *testing.T, adjust *api.ContainerAdjustment) (*specs.Spec, Update, error) {
	t.Helper()
	a, own, err := newAdjustment(adjust)
	if err != nil {
		return nil, own, err
	}
	data, err := json.Marshal(map[string]any{"adjustment": a})
	testutil.Must(t, err)
	var record struct {
		Adjustment *Adjustment `json:"adjustment,omitempty"`
	}
	testutil.Must(t, json.Unmarshal(data, &record))
	spec := testSpec()
	return spec, own, record.Adjustment.Apply(spec, testNode)
}

func TestAdjustmentsAreApplied(t *testing.T) {
	t.Parallel()
	source := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	testutil.Must(t, os.Symlink(source, link))
	a := &api.ContainerAdjustment{}
	a.RemoveEnv("DROP")
	a.AddEnv("KEEP", "2")
	a.AddEnv("NEW", "a=b")
	a.SetArgs([]string{"other", "arg"})
	a.AddMount(&api.Mount{Destination: "/a/", Type: "bind", Source: link, Options: []string{"rbind"}})
	a.RemoveMount("/gone")
	a.RemoveDevice("/dev/old")
	a.AddDevice(&api.LinuxDevice{Path: "/dev/same", Type: "c", Major: 7, Minor: 8})
	a.AddRlimit("RLIMIT_NOFILE", 20, 10)
	a.SetLinuxSysctl("net/z", "3")
	a.Linux.Sysctl["-net.x"] = ""
	a.Linux.Sysctl["-net.y"], a.Linux.Sysctl["net.y"] = "", "4"
	a.AddOrReplaceNamespace(&api.LinuxNamespace{Type: "network", Path: "/run/netns/y"})
	a.RemoveNamespace(&api.LinuxNamespace{Type: "pid"})
	score := -500
	a.SetLinuxOomScoreAdj(&score)
	a.AddHooks(&api.Hooks{Prestart: []*api.Hook{{Path: "/p"}}, StartContainer: []*api.Hook{{Path: "/s", Timeout: api.Int(3)}}})
	a.SetLinuxSeccompPolicy(&api.LinuxSeccomp{DefaultAction: "SCMP_ACT_ERRNO", DefaultErrno: api.UInt32(uint32(38)), Architectures: []string{"SCMP_ARCH_X86_64"}, Flags: []string{"SECCOMP_FILTER_FLAG_LOG"}})
	a.SetLinuxMemoryPolicy(api.MpolMode_MPOL_BIND, "0")
	a.Linux.NetDevices = map[string]*api.LinuxNetDevice{"host0": {Name: "eth1"}, "-gone": nil}
	a.AddAnnotation("run.oci.keep_original_groups", "1")
	spec, own, err := apply(t, a)
	testutil.Must(t, err)
	if !own.Empty() {
		t.Errorf("limits are changed: %v", own)
	}
	for what, c := range map[string]struct{ got, want any }{
		"env":        {spec.Process.Env, []string{"PATH=/bin", "KEEP=2", "NEW=a=b"}},
		"args":       {spec.Process.Args, []string{"other", "arg"}},
		"mounts":     {destinations(spec), []string{"/proc", "/a", "/a/b"}},
		"source":     {spec.Mounts[1].Source, source},
		"devices":    {spec.Linux.Devices, []specs.LinuxDevice{{Path: "/dev/same", Type: "c", Major: 7, Minor: 8}}},
		"rules":      {len(spec.Linux.Resources.Devices), 1},
		"rlimits":    {spec.Process.Rlimits, []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 20, Soft: 10}}},
		"sysctl":     {spec.Linux.Sysctl, map[string]string{"net.y": "4", "net.z": "3"}},
		"namespaces": {spec.Linux.Namespaces, []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace, Path: "/run/netns/y"}}},
		"oom":        {*spec.Process.OOMScoreAdj, -500},
		"prestart":   {spec.Hooks.Prestart[0].Path, "/p"}, //nolint:staticcheck // deprecated, but in use
		"hook":       {*spec.Hooks.StartContainer[0].Timeout, 3},
		"errno":      {*spec.Linux.Seccomp.DefaultErrnoRet, uint(38)},
		"flags":      {spec.Linux.Seccomp.Flags, []specs.LinuxSeccompFlag{specs.LinuxSeccompFlagLog}},
		"numa":       {string(spec.Linux.MemoryPolicy.Mode), "MPOL_BIND"},
		"network":    {spec.Linux.NetDevices, map[string]specs.LinuxNetDevice{"host0": {Name: "eth1"}}},
		"annotation": {len(spec.Annotations), 0}, // libcontainer and systemd would interpret them
	} {
		t.Run(what, func(t *testing.T) {
			if !reflect.DeepEqual(c.got, c.want) {
				t.Errorf("got %v, want %v", c.got, c.want)
			}
		})
	}
}

func destinations(spec *specs.Spec) (all []string) {
	for _, m := range spec.Mounts {
		all = append(all, m.Destination)
	}
	return all
}

func TestNoAdjustmentChangesNothing(t *testing.T) {
	t.Parallel()
	empty := &api.ContainerAdjustment{Hooks: &api.Hooks{}, Linux: &api.LinuxContainerAdjustment{Resources: &api.LinuxResources{Memory: &api.LinuxMemory{}}, Rdt: &api.LinuxRdt{}}}
	a, own, err := newAdjustment(empty)
	if a != nil || !own.Empty() || err != nil {
		t.Errorf("adjustment %v, limits %v, error %v", a, own, err)
	}
	spec, _, err := apply(t, empty)
	if err != nil || !reflect.DeepEqual(spec, testSpec()) {
		t.Errorf("the spec is changed (error %v)", err)
	}
}

func TestAdjustmentsAreRefusedByName(t *testing.T) {
	t.Parallel()
	linux := func(l *api.LinuxContainerAdjustment) *api.ContainerAdjustment {
		return &api.ContainerAdjustment{Linux: l}
	}
	memory := func(m *api.LinuxMemory) *api.ContainerAdjustment {
		return linux(&api.LinuxContainerAdjustment{Resources: &api.LinuxResources{Memory: m}})
	}
	for _, c := range []struct {
		code   codes.Code
		text   string
		adjust *api.ContainerAdjustment
	}{
		{codes.Unimplemented, "cgroups path", linux(&api.LinuxContainerAdjustment{CgroupsPath: "/x"})},
		{codes.Unimplemented, "RDT", linux(&api.LinuxContainerAdjustment{Rdt: &api.LinuxRdt{ClosId: api.String("x")}})},
		{codes.Unimplemented, "RDT class", linux(&api.LinuxContainerAdjustment{Resources: &api.LinuxResources{RdtClass: api.String("x")}})},
		{codes.Unimplemented, "block I/O class", linux(&api.LinuxContainerAdjustment{Resources: &api.LinuxResources{BlockioClass: api.String("x")}})},
		{codes.InvalidArgument, "network device", linux(&api.LinuxContainerAdjustment{NetDevices: map[string]*api.LinuxNetDevice{"a/b": {}}})},
		{codes.Unimplemented, "poststop", &api.ContainerAdjustment{Hooks: &api.Hooks{Poststop: []*api.Hook{{Path: "/x"}}}}},
		{codes.Unimplemented, "seccomp listener", linux(&api.LinuxContainerAdjustment{SeccompPolicy: &api.LinuxSeccomp{ListenerPath: "/x"}})},
		{codes.Unimplemented, "namespace of type \"mount\"", linux(&api.LinuxContainerAdjustment{Namespaces: []*api.LinuxNamespace{{Type: "mount"}}})},
		{codes.Unimplemented, "namespace of type \"user\"", linux(&api.LinuxContainerAdjustment{Namespaces: []*api.LinuxNamespace{{Type: "-user"}}})},
		{codes.Unimplemented, "kernel memory", memory(&api.LinuxMemory{Kernel: api.Int64(1)})},
		{codes.Unimplemented, "TCP memory", memory(&api.LinuxMemory{KernelTcp: api.Int64(1)})},
		{codes.Unimplemented, "swappiness", memory(&api.LinuxMemory{Swappiness: api.UInt64(0)})},
		{codes.Unimplemented, "OOM killer", memory(&api.LinuxMemory{DisableOomKiller: api.Bool(true)})},
		{codes.Unimplemented, "hierarchy", memory(&api.LinuxMemory{UseHierarchy: api.Bool(true)})},
		{codes.Unimplemented, "realtime", linux(&api.LinuxContainerAdjustment{Resources: &api.LinuxResources{Cpu: &api.LinuxCPU{RealtimePeriod: api.UInt64(1)}}})},
		{codes.Unimplemented, "CDI device \"v/c=x\"", &api.ContainerAdjustment{CDIDevices: []*api.CDIDevice{{Name: "v/c=x"}}}},
		{codes.InvalidArgument, "processes", linux(&api.LinuxContainerAdjustment{Resources: &api.LinuxResources{Pids: &api.LinuxPids{Limit: -2}}})},
		{codes.InvalidArgument, "environment variable", &api.ContainerAdjustment{Env: []*api.KeyValue{{Key: "A=B"}}}},
		{codes.InvalidArgument, "environment variable", &api.ContainerAdjustment{Env: []*api.KeyValue{{Key: "A", Value: "\x00"}}}},
		{codes.InvalidArgument, "argument 0", &api.ContainerAdjustment{Args: []string{""}}},
		{codes.InvalidArgument, "RLIMIT_X", &api.ContainerAdjustment{Rlimits: []*api.POSIXRlimit{{Type: "RLIMIT_X"}}}},
		{codes.InvalidArgument, "soft limit 2", &api.ContainerAdjustment{Rlimits: []*api.POSIXRlimit{{Type: "RLIMIT_CPU", Soft: 2, Hard: 1}}}},
		{codes.InvalidArgument, "hook", &api.ContainerAdjustment{Hooks: &api.Hooks{Poststart: []*api.Hook{{Path: "x"}}}}},
		{codes.InvalidArgument, "below the root", &api.ContainerAdjustment{Mounts: []*api.Mount{{Destination: "/x/.."}}}},
		{codes.InvalidArgument, "source", &api.ContainerAdjustment{Mounts: []*api.Mount{{Destination: "/x", Type: "bind", Source: "y"}}}},
		{codes.InvalidArgument, "source", &api.ContainerAdjustment{Mounts: []*api.Mount{{Destination: "/x", Type: "none", Source: "y", Options: []string{"rbind"}}}}},
		{codes.InvalidArgument, "does not exist", &api.ContainerAdjustment{Mounts: []*api.Mount{{Destination: "/x", Type: "bind", Source: "/no/such/file"}}}},
		{codes.InvalidArgument, "/dev/../etc", linux(&api.LinuxContainerAdjustment{Devices: []*api.LinuxDevice{{Path: "/dev/../etc", Type: "c"}}})},
		{codes.InvalidArgument, "unknown type", linux(&api.LinuxContainerAdjustment{Devices: []*api.LinuxDevice{{Path: "/dev/x", Type: "z"}}})},
		{codes.InvalidArgument, "absolute path", linux(&api.LinuxContainerAdjustment{Namespaces: []*api.LinuxNamespace{{Type: "ipc", Path: "x"}}})},
		{codes.InvalidArgument, "oom_score_adj", linux(&api.LinuxContainerAdjustment{OomScoreAdj: &api.OptionalInt{Value: 2000}})},
		{codes.InvalidArgument, "sysctl", linux(&api.LinuxContainerAdjustment{Sysctl: map[string]string{"net.x": "bad"}})},
	} {
		t.Run(c.text, func(t *testing.T) {
			_, _, err := apply(t, c.adjust)
			if errdefs.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v: error %v (%s), want %s and %q", c.adjust, err, errdefs.Code(err), c.code, c.text)
			}
		})
	}
}

// A pulled seccomp profile is a custom one, so the option nri.reject protects it. Its base, which
// the spec has in the listener's metadata, is not shown to plugins, because they cannot set it.
func TestPulledSeccompProfile(t *testing.T) {
	t.Parallel()
	spec := testSpec()
	spec.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, ListenerMetadata: "{}"}
	c := (&Container{RuntimeSpec: spec, Config: &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{
		SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_OCI, OciRef: "r"}}}}}).api()
	if kind := c.Linux.SeccompProfile.ProfileType; kind != api.SecurityProfile_LOCALHOST {
		t.Errorf("its kind is %v", kind)
	}
	if p := c.Linux.SeccompPolicy; p.DefaultAction != "SCMP_ACT_ALLOW" || p.ListenerMetadata != "" {
		t.Errorf("its policy is %v", p)
	}
}

// Resources survive the way to plugins and back unchanged.
func TestResources(t *testing.T) {
	t.Parallel()
	cri := &runtimeapi.LinuxContainerResources{CpuPeriod: 1, CpuQuota: -1, CpuShares: 3, MemoryLimitInBytes: 4, MemorySwapLimitInBytes: -1, CpusetCpus: "0", CpusetMems: "1",
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 9}}, Unified: map[string]string{"memory.high": "7"}}
	back, limits, err := toCRI(fromCRI(cri))
	if err != nil || limits != nil || !proto.Equal(back, cri) {
		t.Errorf("got %v, %v, %v", back, limits, err)
	}
	_, limits, err = toCRI(&api.LinuxResources{Pids: &api.LinuxPids{Limit: -1}, Memory: &api.LinuxMemory{Reservation: api.Int64(5)}})
	testutil.Must(t, err)
	var before *Limits
	seven := int64(7)
	merged := before.Merge(limits).Merge(&Limits{Pids: &seven}).Merge(nil)
	spec := &specs.LinuxResources{}
	merged.AddTo(spec)
	if *spec.Pids.Limit != 7 || *spec.Memory.Reservation != 5 || *limits.Pids != -1 {
		t.Errorf("limits are %v and %v", spec, limits)
	}
}

func TestConversion(t *testing.T) {
	t.Parallel()
	pod := (&Pod{ID: "p", Handler: "h", IPs: []string{"10.0.0.1"}, PID: 7, NetNS: "/run/netns/x", CgroupsPath: "/pod/p", Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "n", Namespace: "ns", Uid: "u"}, Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "1"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/pod", Overhead: &runtimeapi.LinuxContainerResources{CpuShares: 2}, Resources: &runtimeapi.LinuxContainerResources{CpuShares: 3}},
	}}).api()
	wantPod := &api.PodSandbox{Id: "p", Name: "n", Namespace: "ns", Uid: "u", Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"a": "1"},
		RuntimeHandler: "h", Pid: 7, Ips: []string{"10.0.0.1"}, Linux: &api.LinuxPodSandbox{CgroupParent: "/pod", CgroupsPath: "/pod/p",
			Namespaces:  []*api.LinuxNamespace{{Type: "network", Path: "/run/netns/x"}},
			PodOverhead: &api.LinuxResources{Cpu: &api.LinuxCPU{Shares: api.UInt64(2)}, Memory: &api.LinuxMemory{}}, PodResources: &api.LinuxResources{Cpu: &api.LinuxCPU{Shares: api.UInt64(3)}, Memory: &api.LinuxMemory{}}}}
	if !proto.Equal(pod, wantPod) {
		t.Errorf("pod is\n%v, want\n%v", pod, wantPod)
	}
	adjustment := &Adjustment{&api.ContainerAdjustment{Annotations: map[string]string{"new": "1", "-old": "", "-both": "", "both": "2"}}}
	c := (&Container{ID: "c", PodID: "p", ImageID: "sha256:1", State: runtimeapi.ContainerState_CONTAINER_EXITED, CreatedAt: time.Unix(1, 0), ExitCode: 3, PID: 9, RuntimeSpec: testSpec(), Adjustment: adjustment,
		Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "n"}, Image: &runtimeapi.ImageSpec{Image: "sha256:1", UserSpecifiedImage: "busybox"},
			Annotations: map[string]string{"old": "1", "both": "1"}, CDIDevices: []*runtimeapi.CDIDevice{{Name: "v/c=d"}},
			Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "/p"}}}}}).api()
	for what, v := range map[string]struct{ got, want any }{
		"identity":    {[]string{c.Id, c.PodSandboxId, c.Name}, []string{"c", "p", "n"}},
		"state":       {c.State, api.ContainerState_CONTAINER_STOPPED},
		"times":       {[]int64{c.CreatedAt, c.StartedAt}, []int64{1e9, 0}},
		"annotations": {c.Annotations, map[string]string{"new": "1", "both": "2"}},
		"image":       {c.Image.Name + " " + c.Image.ConfigDigest, "busybox sha256:1"},
		"env":         {c.Env, testSpec().Process.Env},
		"mounts":      {len(c.Mounts), 3},
		"user":        {c.User.Uid, uint32(5)},
		"oom":         {c.Linux.OomScoreAdj.GetValue(), int64(100)},
		"cdi":         {c.CDIDevices[0].Name, "v/c=d"},
		"seccomp":     {c.Linux.SeccompProfile.ProfileType, api.SecurityProfile_LOCALHOST},
		"namespaces":  {len(c.Linux.Namespaces), 3},
	} {
		t.Run(what, func(t *testing.T) {
			if !reflect.DeepEqual(v.got, v.want) {
				t.Errorf("got %v, want %v", v.got, v.want)
			}
		})
	}
}

// Any adjustment that passes the check is applied without a panic and keeps protected fields.
func FuzzAdjustment(f *testing.F) {
	seed := &api.ContainerAdjustment{}
	seed.AddEnv("A", "b")
	seed.RemoveEnv("KEEP")
	seed.AddMount(&api.Mount{Destination: "/x", Type: "tmpfs"})
	seed.AddDevice(&api.LinuxDevice{Path: "/dev/x", Type: "c"})
	seed.SetLinuxMemoryLimit(1)
	seed.SetLinuxSysctl("net.x", "1")
	data, err := proto.Marshal(seed)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		adjust := &api.ContainerAdjustment{}
		if proto.Unmarshal(data, adjust) != nil {
			return
		}
		spec, _, err := apply(t, adjust)
		if err != nil {
			if code := errdefs.Code(err); code == codes.Internal {
				t.Errorf("code %s: %v", code, err)
			}
			return
		}
		if len(spec.Annotations) != 0 || spec.Linux.CgroupsPath != "" || !reflect.DeepEqual(spec.Root, &specs.Root{}) {
			t.Errorf("annotations, cgroup or root changed: %v", spec)
		}
		if !slices.ContainsFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.MountNamespace }) {
			t.Error("the mount namespace is gone")
		}
		if slices.Contains(destinations(spec), "/") {
			t.Error("a mount on the root passed the check")
		}
	})
}
