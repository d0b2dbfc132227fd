package integration

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// adjusting returns a CreateContainer function that fills in an adjustment.
func adjusting(change func(a *api.ContainerAdjustment)) func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		a := &api.ContainerAdjustment{}
		change(a)
		return a, nil, nil
	}
}

func memoryUpdate(id string, limit int64) *api.ContainerUpdate {
	u := &api.ContainerUpdate{ContainerId: id}
	u.SetLinuxMemoryLimit(limit)
	return u
}

// A plugin gets each event of a pod and a container once and in order, even if kubelet repeats
// calls.
func TestNRIEvents(t *testing.T) {
	d := harness.StartDaemon(t)
	p := connectPlugin(t, d, "10", "events", &nriPlugin{})
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}}))
	c.Stop(t, 0)
	c.Stop(t, 0)
	never := pod.Create(t)
	short, _ := pod.RunToEnd(t, harness.Command("true"))
	pod.Stop(t)
	pod.Stop(t)
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), never.Id))
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), short.Id))
	pod.Remove(t)
	pod.Remove(t)
	podName, name, neverName, shortName := pod.Config.Metadata.Name, c.Config.Metadata.Name, never.Config.Metadata.Name, short.Config.Metadata.Name
	p.waitEvents(t,
		"RunPodSandbox "+podName,
		"CreateContainer "+name, "PostCreateContainer "+name, "StartContainer "+name, "PostStartContainer "+name,
		"UpdateContainer "+name, "PostUpdateContainer "+name, "StopContainer "+name,
		"CreateContainer "+neverName, "PostCreateContainer "+neverName,
		"CreateContainer "+shortName, "PostCreateContainer "+shortName, "StartContainer "+shortName, "PostStartContainer "+shortName, "StopContainer "+shortName,
		"StopPodSandbox "+podName,
		"RemoveContainer "+name, "RemoveContainer "+neverName, "RemoveContainer "+shortName,
		"RemovePodSandbox "+podName)
}

// Plugins run in the order of their index. Each sees the changes of the earlier plugins. The
// changes apply to the container, its execs and its status, and survive a restart of the daemon.
func TestNRIOrderAndAdjustments(t *testing.T) {
	d := harness.StartDaemon(t)
	volume := filepath.Join(d.Dir, "volume")
	harness.Must(t, os.Mkdir(volume, 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(volume, "file"), []byte("from a plugin"), 0o644))
	var seen []string
	second := &nriPlugin{create: func(_ *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		seen = c.Env
		a := &api.ContainerAdjustment{}
		a.AddEnv("SECOND", c.Annotations["first"])
		return a, nil, nil
	}}
	first := &nriPlugin{create: adjusting(func(a *api.ContainerAdjustment) {
		a.AddEnv("FIRST", "1")
		a.RemoveEnv("GONE")
		a.AddAnnotation("first", "was here")
		a.AddMount(&api.Mount{Destination: "/volume", Source: volume, Type: "bind", Options: []string{"rbind", "ro", "rprivate"}})
		a.AddMount(&api.Mount{Destination: "/volume/tmp", Source: "tmpfs", Type: "tmpfs", Options: []string{"size=65536"}})
		a.SetLinuxMemoryLimit(48 << 20)
		a.SetLinuxCPUQuota(30000)
		a.SetLinuxCPUPeriod(100000)
		a.SetLinuxPidLimits(77)
		a.AddRlimit("RLIMIT_NOFILE", 333, 222)
		score := 555
		a.SetLinuxOomScoreAdj(&score)
	})}
	harness.Must(t, os.Mkdir(filepath.Join(volume, "tmp"), 0o755))
	connectPlugin(t, d, "20", "second", second) // connects first, but runs second by its index
	connectPlugin(t, d, "10", "first", first)

	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t, harness.Env("GONE", "x"))
	d.Restart(t) // the record keeps the adjustments between creation and start
	c.Start(t)
	harness.WantText(t, "environment for the second plugin", strings.Join(seen, " "), "FIRST=1")
	check := func(t *testing.T) {
		t.Helper()
		harness.Equal(t, "environment of an exec", c.Exec(t, "sh", "-c", "echo $FIRST/$SECOND/${GONE-none}"), "1/was here/none")
		harness.Equal(t, "environment", c.Exec(t, "sh", "-c", "tr '\\0' '\\n' </proc/1/environ | grep -E 'FIRST|SECOND|GONE'"), "FIRST=1\nSECOND=was here")
		harness.Equal(t, "mount", c.Exec(t, "sh", "-c", "cat /volume/file; touch /volume/x 2>/dev/null || echo ' ro'; touch /volume/tmp/x && echo rw"), "from a plugin ro\nrw")
		memory, quota := limitsOf(t, c)
		harness.Equal(t, "memory limit", memory, strconv.Itoa(48<<20))
		harness.Equal(t, "CPU quota", quota, "30000")
		harness.Equal(t, "limit of processes", machine.CgroupFile(t, c.Pid(t), "pids", "pids.max", "pids.max"), "77")
		harness.Equal(t, "open files of an exec", c.Exec(t, "sh", "-c", "ulimit -n"), "222")
		harness.Equal(t, "oom_score_adj", c.Exec(t, "cat", "/proc/1/oom_score_adj"), "555")
		status := c.Status(t)
		harness.Equal(t, "reported memory limit", status.Resources.GetLinux().GetMemoryLimitInBytes(), int64(48<<20))
		if len(status.Annotations) != 0 {
			t.Errorf("the status shows annotations of plugins: %v", status.Annotations)
		}
	}
	check(t)
	d.Restart(t)
	check(t)
}

// Plugins can adjust a container's command, devices, sysctls, hooks, scheduling and seccomp policy.
func TestNRIAdjustsMore(t *testing.T) {
	d := harness.StartDaemon(t)
	hooks := filepath.Join(d.Dir, "hooks")
	harness.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "nri0"}, PeerName: "nri1"})) // removed with the pod's network
	connectPlugin(t, d, "10", "more", &nriPlugin{create: adjusting(func(a *api.ContainerAdjustment) {
		a.SetArgs([]string{"sh", "-c", "echo replaced; exec sleep 100000"})
		a.AddDevice(&api.LinuxDevice{Path: "/dev/zero2", Type: "c", Major: 1, Minor: 5, FileMode: api.FileMode(os.FileMode(0o666))})
		a.SetLinuxSysctl("net.ipv4.ip_unprivileged_port_start", "99")
		a.AddHooks(&api.Hooks{
			CreateRuntime: []*api.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "echo createRuntime >>" + hooks}}},
			Poststart:     []*api.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "echo poststart >>" + hooks}}},
		})
		a.AddLinuxNetDevice("nri1", &api.LinuxNetDevice{Name: "eth7"})
		a.SetLinuxIOPriority(&api.LinuxIOPriority{Class: api.IOPrioClass_IOPRIO_CLASS_BE, Priority: 6})
		a.SetLinuxScheduler(&api.LinuxScheduler{Policy: api.LinuxSchedulerPolicy_SCHED_BATCH})
		a.SetLinuxSeccompPolicy(&api.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW",
			Syscalls: []*api.LinuxSyscall{{Names: []string{"mkdir", "mkdirat"}, Action: "SCMP_ACT_ERRNO", ErrnoRet: api.UInt32(uint32(syscall.EXDEV))}}})
	})})
	pod := d.RunPod(t)
	c := pod.Run(t)
	c.WaitOutput(t, "replaced")
	harness.Equal(t, "device", c.Exec(t, "sh", "-c", "head -c 3 /dev/zero2 | wc -c"), "3")
	harness.Equal(t, "network device", c.Exec(t, "sh", "-c", "ls -d /sys/class/net/eth7"), "/sys/class/net/eth7")
	harness.Equal(t, "sysctl", c.Exec(t, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start"), "99")
	harness.Equal(t, "scheduling policy", c.Exec(t, "sh", "-c", "grep ^policy /proc/1/sched | tr -d ' '"), "policy:3")
	harness.WantText(t, "error of mkdir", c.Exec(t, "sh", "-c", "mkdir /tmp/x 2>&1 || true"), "Invalid cross-device link")
	harness.Equal(t, "hooks", strings.Join(machine.ReadLines(hooks), " "), "createRuntime poststart")
}

// Unsupported adjustments are refused by name, and the container is not created.
func TestNRIRefusals(t *testing.T) {
	d := harness.StartDaemon(t)
	p := &nriPlugin{}
	connectPlugin(t, d, "10", "wild", p)
	pod := d.RunPod(t, harness.HostNetwork)
	for name, test := range map[string]struct {
		change func(a *api.ContainerAdjustment)
		code   codes.Code
		text   string
	}{
		"cgroups path": {func(a *api.ContainerAdjustment) { a.SetLinuxCgroupsPath("/elsewhere") }, codes.Unimplemented, "/elsewhere"},
		"block I/O":    {func(a *api.ContainerAdjustment) { a.SetLinuxBlockIOClass("fast") }, codes.Unimplemented, "fast"},
		"RDT":          {func(a *api.ContainerAdjustment) { a.SetLinuxRDTClass("gold") }, codes.Unimplemented, "gold"},
		"poststop":     {func(a *api.ContainerAdjustment) { a.AddHooks(&api.Hooks{Poststop: []*api.Hook{{Path: "/bin/x"}}}) }, codes.Unimplemented, "/bin/x"},
		"swappiness":   {func(a *api.ContainerAdjustment) { a.SetLinuxMemorySwappiness(1) }, codes.Unimplemented, "swappiness"},
		"namespace":    {func(a *api.ContainerAdjustment) { a.AddOrReplaceNamespace(&api.LinuxNamespace{Type: "user"}) }, codes.Unimplemented, "user"},
		"sysctl":       {func(a *api.ContainerAdjustment) { a.SetLinuxSysctl("kernel.panic", "1") }, codes.InvalidArgument, "kernel.panic"},
		"mount":        {func(a *api.ContainerAdjustment) { a.AddMount(&api.Mount{Destination: "/", Type: "tmpfs"}) }, codes.InvalidArgument, "below the root"},
		"cpuset":       {func(a *api.ContainerAdjustment) { a.SetLinuxCPUSetCPUs("all") }, codes.InvalidArgument, "all"},
	} {
		p.create = adjusting(test.change)
		_, err := pod.TryCreate(t)
		t.Run(name, func(t *testing.T) { harness.WantCode(t, err, test.code, test.text) })
	}
	harness.Equal(t, "number of containers", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 0)
}

// An error of a plugin fails the creation of that container only. The plugins get the event of its
// removal.
func TestNRIErrorFailsOneContainer(t *testing.T) {
	d := harness.StartDaemon(t)
	other := connectPlugin(t, d, "10", "other", &nriPlugin{})
	connectPlugin(t, d, "20", "refuser", &nriPlugin{create: func(_ *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		if c.Labels["refuse"] != "" {
			return nil, nil, errors.New("not this one")
		}
		return nil, nil, nil
	}})
	pod := d.RunPod(t, harness.HostNetwork)
	other.forget()
	refused, err := pod.TryCreate(t, func(c *runtimeapi.ContainerConfig) { c.Labels["refuse"] = "yes" })
	harness.WantCode(t, err, codes.Aborted, "not this one")
	name := refused.Config.Metadata.Name
	other.waitEvents(t, "CreateContainer "+name, "RemoveContainer "+name)
	pod.Run(t)
}

// A plugin that registers late receives all existing objects. So does a plugin that a new daemon
// starts, and one that connects to the new daemon.
func TestNRISynchronisation(t *testing.T) {
	d := harness.StartDaemon(t, installPlugin("05-installed", ""))
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Env("KEY", "value"))
	pod.RunToEnd(t, harness.Command("true")) // exited: plugins do not get it
	check := func(name string) {
		t.Helper()
		var pods []*api.PodSandbox
		var containers []*api.Container
		connectPlugin(t, d, "10", name, &nriPlugin{synchronize: func(p []*api.PodSandbox, c []*api.Container) { pods, containers = p, c }})
		if len(pods) != 1 || len(containers) != 1 {
			t.Fatalf("the plugin got pods %v and containers %v, want one each", pods, containers)
		}
		harness.Equal(t, "pod", pods[0].Id+" "+pods[0].Ips[0], pod.Id+" "+pod.Ip(t))
		harness.Equal(t, "pid of the pod", int(pods[0].Pid), pod.PausePID(t))
		harness.Equal(t, "container", containers[0].Id+" "+containers[0].PodSandboxId, c.Id+" "+pod.Id)
		harness.Equal(t, "state", containers[0].State, api.ContainerState_CONTAINER_RUNNING)
		harness.Equal(t, "pid of the container", int(containers[0].Pid), c.Pid(t))
		if !strings.Contains(strings.Join(containers[0].Env, " "), "KEY=value") || len(containers[0].Mounts) == 0 {
			t.Errorf("the plugin got the environment %v and mounts %v", containers[0].Env, containers[0].Mounts)
		}
	}
	check("late")
	d.Restart(t)
	check("new")
	var synced []string
	for _, line := range machine.ReadLines(installedEvents(d)) {
		if strings.HasSuffix(line, " Synchronize") {
			synced = append(synced, line)
		}
	}
	harness.Equal(t, "synchronisations of the installed plugin", len(synced), 2)
}

// A plugin that does not answer is dropped. Its timeout delays the request, but the request
// succeeds, and berth still calls the other plugins.
func TestNRIHangingPlugin(t *testing.T) {
	testutil.Long(t)
	d := harness.StartDaemon(t, harness.WithConfig(`nri.request_timeout = "10s"`)) // for the other plugin, on a loaded machine
	for _, event := range []string{"RunPodSandbox", "CreateContainer", "StartContainer", "UpdateContainer", "StopContainer", "RemoveContainer", "StopPodSandbox", "RemovePodSandbox"} {
		t.Run(event, func(t *testing.T) {
			end := make(chan struct{})
			hanging := &nriPlugin{before: func(e string) error {
				if e == event {
					<-end
				}
				return nil
			}}
			connectPlugin(t, d, "10", "hanging-"+strings.ToLower(event), hanging)
			t.Cleanup(func() { close(end) })
			after := connectPlugin(t, d, "20", "after-"+strings.ToLower(event), &nriPlugin{})
			pod := d.RunPod(t, harness.HostNetwork)
			c := pod.Run(t)
			harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), c.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}}))
			c.Stop(t, 0)
			harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
			pod.Remove(t)
			<-hanging.closed
			harness.EventuallyGot(t, "11 events of the other plugin", func() (bool, any) { events := after.noted(); return len(events) == 11, events })
		})
	}
}

// A plugin that does not answer when it registers is not registered.
func TestNRIHangingRegistration(t *testing.T) {
	testutil.Long(t)
	d := harness.StartDaemon(t, harness.WithConfig(`nri.request_timeout = "10s"`))
	asked, end := make(chan struct{}), make(chan struct{})
	p := &nriPlugin{closed: make(chan struct{}), before: func(string) error { close(asked); <-end; return nil }}
	p.stub = harness.Get(stub.New(p, stub.WithSocketPath(nriSocket(d)), stub.WithPluginIdx("10"), stub.WithPluginName("mute"),
		stub.WithOnClose(func() { close(p.closed) }), stub.WithLogger(quiet{})))(t)
	harness.Must(t, p.stub.Start(t.Context()))
	select {
	case <-asked:
	case <-p.closed:
		t.Fatal("the plugin was dropped before it got an event")
	}
	d.RunPod(t, harness.HostNetwork).Run(t)
	<-p.closed
	close(end)
	p.waitEvents(t, "Synchronize 0 0")
}

// A plugin that is killed during a call is dropped.
func TestNRIKilledPlugin(t *testing.T) {
	d := harness.StartDaemon(t, installPlugin("10-installed", "CreateContainer"), harness.WithConfig(`nri.request_timeout = "20s"`))
	pod := d.RunPod(t, harness.HostNetwork)
	killed := make(chan error, 1)
	go func() {
		killed <- harness.WaitFor(func() error {
			for _, line := range machine.ReadLines(installedEvents(d)) {
				if pid, ok := strings.CutSuffix(line, " CreateContainer"); ok {
					pid, err := strconv.Atoi(pid)
					if err != nil {
						return err
					}
					return syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			return errors.New("the plugin got no event")
		})
	}()
	c := pod.Run(t)
	harness.Must(t, <-killed)
	c.Exec(t, "true")
	pod.Run(t)
}

// A plugin may change the limits of containers at any time.
func TestNRIUnsolicitedUpdate(t *testing.T) {
	d := harness.StartDaemon(t)
	p := connectPlugin(t, d, "10", "updater", &nriPlugin{})
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 }))
	update := memoryUpdate(c.Id, 96<<20)
	update.SetLinuxPidLimits(55)
	unknown := memoryUpdate("0123456789", 96<<20)
	refused := memoryUpdate(c.Id, 96<<20)
	refused.SetLinuxBlockIOClass("fast")
	prefix := memoryUpdate(c.Id[:12], 80<<20) // a prefix of an ID is no ID
	failed := harness.Get(p.stub.UpdateContainers([]*api.ContainerUpdate{update, unknown, refused, prefix}))(t)
	if len(failed) != 3 || failed[0].ContainerId != unknown.ContainerId || failed[1].Linux.Resources.BlockioClass == nil || failed[2].ContainerId != prefix.ContainerId {
		t.Errorf("failed updates: %v", failed)
	}
	check := func() {
		t.Helper()
		memory, _ := limitsOf(t, c)
		harness.Equal(t, "memory limit", memory, strconv.Itoa(96<<20))
		harness.Equal(t, "limit of processes", machine.CgroupFile(t, c.Pid(t), "pids", "pids.max", "pids.max"), "55")
		harness.Equal(t, "reported memory limit", c.Status(t).Resources.GetLinux().GetMemoryLimitInBytes(), int64(96<<20))
	}
	check()
	d.Restart(t)
	check()
}

// A plugin can change an update. At an update or a stop of one container it can also change another
// container.
func TestNRIUpdates(t *testing.T) {
	d := harness.StartDaemon(t)
	p := &nriPlugin{}
	connectPlugin(t, d, "10", "balancer", p)
	pod := d.RunPod(t, harness.HostNetwork)
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 })
	a, b := pod.Run(t, limit), pod.Run(t, limit)
	memoryOf := func(c *harness.Container, want int64) {
		t.Helper()
		harness.EventuallyGot(t, fmt.Sprintf("memory limit %d", want), func() (bool, any) { got, _ := limitsOf(t, c); return got == strconv.FormatInt(want, 10), got })
	}
	p.update = func(c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
		if got := r.GetMemory().GetLimit().GetValue(); got != 128<<20 {
			return nil, fmt.Errorf("the requested limit is %d", got)
		}
		return []*api.ContainerUpdate{memoryUpdate(c.Id, 100<<20), memoryUpdate(b.Id, 80<<20)}, nil
	}
	change := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}}
	harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), a.Id, change))
	memoryOf(a, 100<<20)
	memoryOf(b, 80<<20)
	harness.Equal(t, "reported memory limit", a.Status(t).Resources.GetLinux().GetMemoryLimitInBytes(), int64(100<<20))

	p.update = func(*api.Container, *api.LinuxResources) ([]*api.ContainerUpdate, error) {
		return nil, errors.New("no more")
	}
	harness.WantCode(t, d.Cri.UpdateContainerResources(t.Context(), a.Id, change), codes.Aborted, "no more")
	memoryOf(a, 100<<20)

	p.create = func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		return nil, []*api.ContainerUpdate{memoryUpdate(b.Id, 72<<20)}, nil
	}
	pod.Create(t)
	memoryOf(b, 72<<20)

	p.stopped = func(*api.Container) []*api.ContainerUpdate {
		return []*api.ContainerUpdate{memoryUpdate(b.Id, 88<<20)}
	}
	a.Stop(t, 0)
	memoryOf(b, 88<<20)
}

// The operator can forbid adjustments (nri.reject) and require plugins (nri.required_plugins).
func TestNRIValidation(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`nri.reject = ["hooks"]`, `nri.required_plugins = ["needed"]`))
	pod := d.RunPod(t, harness.HostNetwork)
	_, err := pod.TryCreate(t)
	harness.WantCode(t, err, codes.Aborted, "needed")
	p := &nriPlugin{}
	connectPlugin(t, d, "10", "needed", p)
	pod.Create(t)
	p.create = adjusting(func(a *api.ContainerAdjustment) {
		a.AddHooks(&api.Hooks{CreateRuntime: []*api.Hook{{Path: "/bin/true"}}})
	})
	_, err = pod.TryCreate(t)
	harness.WantCode(t, err, codes.Aborted, "hook")
}

// Without NRI, and without nri.socket, no plugin can connect.
func TestNRIDisabled(t *testing.T) {
	for _, line := range []string{"nri.enabled = false", `nri.socket = ""`} {
		t.Run(line, func(t *testing.T) {
			key, _, _ := strings.Cut(line, " ")
			d := harness.StartDaemon(t, func(_ *testing.T, d *harness.Daemon) {
				d.Extra = append(slices.DeleteFunc(d.Extra, func(have string) bool { return strings.HasPrefix(have, key+" ") }), line)
			})
			d.RunPod(t, harness.HostNetwork).Run(t)
			if _, err := os.Stat(nriSocket(d)); !os.IsNotExist(err) {
				t.Errorf("the socket exists: %v", err)
			}
		})
	}
}

// visitor is a plugin that checks its events while it is registered. Each object is announced once,
// before its other events. A container stops once, before it is removed.
type visitor struct {
	mu         sync.Mutex
	pods       map[string]bool
	containers map[string]bool // existing containers: true after their stop event
	wrong      []string        // violations
}

func newVisitor() *visitor {
	return &visitor{pods: map[string]bool{}, containers: map[string]bool{}}
}

func (v *visitor) plugin() *nriPlugin {
	return &nriPlugin{synchronize: v.synchronize, ran: v.ran, create: v.created, stopped: v.stopped, removed: v.removed}
}

// expect records a violation unless ok. The caller holds the lock.
func (v *visitor) expect(ok bool, what, id string) {
	if !ok {
		v.wrong = append(v.wrong, what+" "+id)
	}
}

func (v *visitor) synchronize(pods []*api.PodSandbox, containers []*api.Container) {
	for _, pod := range pods {
		v.ran(pod)
	}
	for _, c := range containers {
		v.addContainer(c)
	}
}

func (v *visitor) ran(pod *api.PodSandbox) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.expect(!v.pods[pod.Id], "second event for the start of pod", pod.Id)
	v.pods[pod.Id] = true
}

func (v *visitor) addContainer(c *api.Container) {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, known := v.containers[c.Id]
	v.expect(!known, "second event for the creation of container", c.Id)
	v.expect(v.pods[c.PodSandboxId], "event for a container without its pod:", c.Id)
	v.containers[c.Id] = false
}

func (v *visitor) created(_ *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	v.addContainer(c)
	return nil, nil, nil
}

func (v *visitor) stopped(c *api.Container) []*api.ContainerUpdate {
	v.mu.Lock()
	defer v.mu.Unlock()
	ended, known := v.containers[c.Id]
	v.expect(known, "event for the exit of the unknown container", c.Id)
	v.expect(!ended, "second event for the exit of container", c.Id)
	v.containers[c.Id] = true
	return nil
}

// removed also handles the event of containers that exited before the plugin registered.
func (v *visitor) removed(c *api.Container) {
	v.mu.Lock()
	defer v.mu.Unlock()
	ended, known := v.containers[c.Id]
	v.expect(ended || !known, "no event for the exit of the removed container", c.Id)
	delete(v.containers, c.Id)
}

// left returns an error if the plugin got no removal event for some container.
func (v *visitor) left() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.containers) > 0 {
		return fmt.Errorf("no event for the removal of %v", v.containers)
	}
	return nil
}

func (v *visitor) check(t *testing.T, name string) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, what := range v.wrong {
		t.Errorf("%s was %s", name, what)
	}
}

// churnPods creates and removes pods in parallel until stop is called. stop returns the first
// error.
func churnPods(t *testing.T, d *harness.Daemon) (stop func() error) {
	t.Helper()
	d.EnsureImage(t, harness.BaseImage)
	ended := make(chan struct{})
	var churn errgroup.Group
	for range 3 {
		configs := []*runtimeapi.PodSandboxConfig{}
		for range 6 {
			configs = append(configs, d.PodConfig(t, harness.HostNetwork))
		}
		churn.Go(func() error {
			for i := 0; ; i++ {
				select {
				case <-ended:
					return nil
				default:
				}
				if err := livePod(d, t.Context(), configs[i%len(configs)]); err != nil {
					return err
				}
			}
		})
	}
	return func() error { close(ended); return churn.Wait() }
}

// Plugins register and disconnect while pods start and end. Each plugin gets every pod and
// container exactly once, at registration or by an event. It gets every exit before the removal.
func TestNRIPluginsConnectAndDisconnect(t *testing.T) {
	d := harness.StartDaemon(t)
	stop := churnPods(t, d)
	for i := range 8 {
		v, name := newVisitor(), fmt.Sprintf("visitor%d", i)
		p := connectPlugin(t, d, "10", name, v.plugin())
		p.awaitEvents(t, 20)
		p.stub.Stop()
		<-p.closed
		v.check(t, name)
	}
	last := newVisitor()
	connectPlugin(t, d, "10", "last", last.plugin()).awaitEvents(t, 20)
	harness.Must(t, stop())
	harness.Must(t, last.left()) // all requests have been answered
	last.check(t, "the last visitor")
}

// A plugin may update containers while it handles an event. An update of that event's container
// fails without a deadlock.
func TestNRIUpdateDuringEvent(t *testing.T) {
	testutil.Long(t)
	d := harness.StartDaemon(t)
	p := &nriPlugin{}
	connectPlugin(t, d, "10", "busy", p)
	pod := d.RunPod(t, harness.HostNetwork)
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 64 << 20 })
	a, b := pod.Run(t, limit), pod.Run(t, limit)
	failed := make(chan []*api.ContainerUpdate, 1)
	p.update = func(c *api.Container, _ *api.LinuxResources) ([]*api.ContainerUpdate, error) {
		f, err := p.stub.UpdateContainers([]*api.ContainerUpdate{memoryUpdate(b.Id, 96<<20), memoryUpdate(a.Id, 96<<20)})
		failed <- f
		return nil, err
	}
	harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), a.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}}))
	if f := <-failed; len(f) != 1 || f[0].ContainerId != a.Id {
		t.Errorf("failed updates: %v", f)
	}
	memory, _ := limitsOf(t, a)
	harness.Equal(t, "memory limit of the event's container", memory, strconv.Itoa(128<<20))
	memory, _ = limitsOf(t, b)
	harness.Equal(t, "memory limit of the other container", memory, strconv.Itoa(96<<20))
	p.update = nil
	p.forget()
	a.Stop(t, 0)
	p.waitEvents(t, "StopContainer "+a.Config.Metadata.Name) // the plugin was not dropped
}

func TestNRIRefusesToStart(t *testing.T) {
	d := harness.NewDaemon(t, func(t *testing.T, d *harness.Daemon) {
		harness.Must(t, os.Mkdir(filepath.Join(d.Dir, "plugins"), 0o755))
		harness.Must(t, os.WriteFile(filepath.Join(d.Dir, "plugins", "README"), nil, 0o755))
	})
	t.Cleanup(func() { d.ForgetMounts(t) })
	out, err := d.ServeCommand().CombinedOutput()
	if err == nil || !strings.Contains(string(out), "README") {
		t.Errorf("the daemon exited with %v: %s", err, out)
	}
}

// The socket of another runtime stays with it. berth runs pods, and starts installed plugins.
func TestNRISocketOfAnotherRuntime(t *testing.T) {
	d := harness.StartDaemon(t, installPlugin("20-good", ""), func(t *testing.T, d *harness.Daemon) {
		harness.Must(t, os.Mkdir(filepath.Dir(nriSocket(d)), 0o700))
		l := harness.Get(net.Listen("unix", nriSocket(d)))(t)
		t.Cleanup(func() { harness.Must(t, l.Close()) })
	})
	d.RunPod(t, harness.HostNetwork).Run(t)
	harness.WantText(t, "log", string(harness.Get(os.ReadFile(d.LogFile()))(t)), "no NRI plugin can connect", "belongs to another runtime")
	harness.WantText(t, "events of the installed plugin", strings.Join(machine.ReadLines(installedEvents(d)), "\n"), "StartContainer")
	conn := harness.Get(net.Dial("unix", nriSocket(d)))(t)
	harness.Must(t, conn.Close())
}

// Installed plugins that do not start or register are skipped.
func TestNRIBrokenPlugins(t *testing.T) {
	testutil.Long(t)
	d := harness.StartDaemon(t, installPlugin("20-good", ""), harness.WithConfig(`nri.registration_timeout = "15s"`), func(t *testing.T, d *harness.Daemon) {
		for name, script := range map[string]string{"05-ends": "#!/bin/sh\nexit 1\n", "06-silent": "#!/bin/sh\nexec sleep 1000\n", "07-nothing": "no program\n"} {
			harness.Must(t, os.WriteFile(filepath.Join(d.Dir, "plugins", name), []byte(script), 0o755))
		}
	})
	d.RunPod(t, harness.HostNetwork).Run(t)
	var got []string
	for _, line := range machine.ReadLines(installedEvents(d)) {
		_, event, _ := strings.Cut(line, " ")
		got = append(got, event)
	}
	// With systemd the harness has run a pod before, which caused earlier events.
	want := []string{"RunPodSandbox", "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer"}
	if len(got) <= len(want) || got[0] != "Synchronize" || !slices.Equal(got[len(got)-len(want):], want) {
		t.Errorf("the good plugin got the events %v, want Synchronize first and %v last", got, want)
	}
}

// A name with a path from a plugin is refused with its container.
func TestNRIPathInNames(t *testing.T) {
	const name = "../../../../run/escape"
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	plugin := &nriPlugin{}
	connectPlugin(t, d, "10", "escape", plugin)
	for what, change := range map[string]func(*api.ContainerAdjustment){
		"sysctl":             func(a *api.ContainerAdjustment) { a.SetLinuxSysctl("net."+name, "1") },
		"network device":     func(a *api.ContainerAdjustment) { a.AddLinuxNetDevice(name, &api.LinuxNetDevice{Name: "eth7"}) },
		"name of the device": func(a *api.ContainerAdjustment) { a.AddLinuxNetDevice("lo", &api.LinuxNetDevice{Name: name}) },
		"CDI device":         func(a *api.ContainerAdjustment) { a.AddCDIDevice(&api.CDIDevice{Name: "vendor.example/dev=" + name}) },
		"file of the cgroup": func(a *api.ContainerAdjustment) { a.AddLinuxUnified(name, "1") },
		"limit":              func(a *api.ContainerAdjustment) { a.AddRlimit(name, 1, 1) },
	} {
		plugin.create = adjusting(change)
		_, err := pod.TryCreate(t)
		if code := harness.CodeOf(err); err == nil || code != codes.InvalidArgument && code != codes.FailedPrecondition {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := os.Lstat("/run/escape"); err == nil {
		t.Error("a file was created outside")
	}
}
