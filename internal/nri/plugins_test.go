package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
)

// testRuntime is a Runtime without objects. update applies its updates.
type testRuntime struct {
	objects func()
	update  func(ctx context.Context, u Update) error
}

func (r testRuntime) Objects() ([]*Pod, []*Container) {
	if r.objects != nil {
		r.objects()
	}
	return nil, nil
}

func (r testRuntime) Update(ctx context.Context, u Update) error { return r.update(ctx, u) }

// testPlugins returns plugins of a runtime without the library.
func testPlugins(t *testing.T, rt Runtime) *Plugins {
	t.Helper()
	dir := t.TempDir()
	p := &Plugins{runtime: rt, own: task.NewLifetime(), cfg: Config{Version: "1", Socket: filepath.Join(dir, "s"), PluginDir: filepath.Join(dir, "none"),
		PluginConfigDir: dir, RegistrationTimeout: 20 * time.Second, RequestTimeout: time.Second, Log: slog.New(slog.DiscardHandler)}}
	p.starting.Store(true)
	return p
}

// answering is a plugin that answers with updates and evictions.
type answering struct {
	stub    stub.Stub
	refuse  error // answer to CreateContainer
	updates []*api.ContainerUpdate
	evictor fixture.Evictor
	pod     *api.PodSandbox // of the last UpdatePodSandbox, with the requested resources
	wanted  [2]*api.LinuxResources
}

func (a *answering) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, a.updates, a.refuse
}

func (a *answering) UpdateContainer(context.Context, *api.PodSandbox, *api.Container, *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	return a.updates, nil
}

func (a *answering) StopContainer(context.Context, *api.PodSandbox, *api.Container) ([]*api.ContainerUpdate, error) {
	return a.updates, nil
}

func (a *answering) UpdatePodSandbox(_ context.Context, pod *api.PodSandbox, overhead, resources *api.LinuxResources) error {
	a.pod, a.wanted = pod, [2]*api.LinuxResources{overhead, resources}
	return nil
}

// connect starts plugins of a runtime, connects one and waits until it is registered.
func connect(t *testing.T, cfg Config, rt Runtime, plugin *answering) *Plugins {
	t.Helper()
	p, err := New(cfg)
	testutil.Must(t, err)
	testutil.Must(t, p.Start(t.Context(), rt))
	t.Cleanup(p.Close)
	s, err := stub.New(plugin, stub.WithSocketPath(p.cfg.Socket), stub.WithPluginIdx("10"), stub.WithPluginName("answering"), stub.WithOnClose(func() {}), plugin.evictor.Option())
	if err == nil {
		err = s.Start(t.Context())
	}
	testutil.Must(t, err)
	t.Cleanup(s.Stop)
	plugin.stub = s
	for p.count.Load() == 0 { // the count follows the registration
		time.Sleep(time.Millisecond)
	}
	return p
}

func refusedUpdate(id string, ignore bool) *api.ContainerUpdate {
	u := &api.ContainerUpdate{ContainerId: id, IgnoreFailure: ignore}
	u.SetLinuxMemorySwappiness(1)
	return u
}

// A process can have only one set of plugins, see New.
func TestPlugins(t *testing.T) {
	cfg := testPlugins(t, nil).cfg
	cfg.RequestTimeout = time.Minute
	programs, plugin := installPrograms(t, cfg), &answering{}
	var updated []Update
	p := connect(t, cfg, testRuntime{update: func(_ context.Context, u Update) error { updated = append(updated, u); return nil }}, plugin)
	t.Run("IgnoreFailure", func(t *testing.T) { testIgnoreFailure(t, p, plugin) })
	t.Run("LibraryDropsPidsOfOthers", func(t *testing.T) { testLibraryDropsPidsOfOthers(t, p, plugin) })
	t.Run("UpdatePodShowsOldAndNew", func(t *testing.T) { testUpdatePodShowsOldAndNew(t, p, plugin) })
	t.Run("Evictions", func(t *testing.T) { testEvictions(t, p, plugin, &updated) })
	t.Run("UnregisteredPrograms", func(t *testing.T) { testUnregisteredPrograms(t, p, programs) }) // closes p
}

func testIgnoreFailure(t *testing.T, p *Plugins, plugin *answering) {
	wanted := &runtimeapi.LinuxContainerResources{CpuShares: 5}
	good := &api.ContainerUpdate{ContainerId: "good"}
	good.SetLinuxMemoryLimit(7)
	plugin.updates = []*api.ContainerUpdate{refusedUpdate("bad", true), good}
	own, others, err := p.UpdateContainer(t.Context(), &Pod{}, &Container{ID: "c"}, wanted)
	if err != nil || !proto.Equal(own.Resources, wanted) || len(others) != 1 || others[0].ContainerID != "good" {
		t.Errorf("own %v, others %v, error %v", own, others, err)
	}
	plugin.updates = []*api.ContainerUpdate{refusedUpdate("bad", false)}
	if _, _, err := p.UpdateContainer(t.Context(), &Pod{}, &Container{ID: "c"}, wanted); errdefs.Code(err) != codes.Unimplemented {
		t.Errorf("mandatory update: %v", err)
	}
}

// The package documentation mentions this bug of the library. If the test fails, the library is
// fixed and the documentation must change.
func testLibraryDropsPidsOfOthers(t *testing.T, p *Plugins, plugin *answering) {
	u := &api.ContainerUpdate{ContainerId: "other"}
	u.SetLinuxMemoryLimit(7)
	u.SetLinuxPidLimits(9)
	plugin.updates = []*api.ContainerUpdate{u}
	updates, err := p.Container(t.Context(), ContainerStopped, &Pod{}, &Container{ID: "c"})
	if err != nil || len(updates) != 1 || updates[0].Resources.MemoryLimitInBytes != 7 || updates[0].Limits != nil {
		t.Errorf("updates %v, error %v", updates, err)
	}
	if own, err := newUpdate(u); err != nil || *own.Limits.Pids != 9 { // as an unsolicited update
		t.Errorf("update %v, error %v", own, err)
	}
}

// Evictions follow the updates of other containers in every kind of request. A refused request has
// none.
func testEvictions(t *testing.T, p *Plugins, plugin *answering, updated *[]Update) {
	good := &api.ContainerUpdate{ContainerId: "good"}
	good.SetLinuxMemoryLimit(7)
	plugin.updates, plugin.evictor.Evict = []*api.ContainerUpdate{good}, []*api.ContainerEviction{{ContainerId: "bad", Reason: "no room"}}
	check := func(what string, got []Update, err error) {
		t.Helper()
		if want := (Update{ContainerID: "bad", Evict: true, Reason: "no room", IgnoreFailure: true}); err != nil || len(got) != 2 || got[0].Evict || !reflect.DeepEqual(got[1], want) {
			t.Errorf("%s: %+v, error %v", what, got, err)
		}
	}
	_, _, others, err := p.CreateContainer(t.Context(), &Pod{}, &Container{ID: "c"})
	check("CreateContainer", others, err)
	_, others, err = p.UpdateContainer(t.Context(), &Pod{}, &Container{ID: "c"}, &runtimeapi.LinuxContainerResources{})
	check("UpdateContainer", others, err)
	_, err = plugin.stub.UpdateContainers(plugin.updates)
	check("UpdateContainers", *updated, err)
	plugin.refuse = errors.New("no")
	if _, _, others, err := p.CreateContainer(t.Context(), &Pod{}, &Container{ID: "c"}); err == nil || len(others) > 0 {
		t.Errorf("refused: %v, error %v", others, err)
	}
	plugin.updates, plugin.evictor.Evict, plugin.refuse = nil, nil, nil
}

func TestDeviceRulesAreNotUpdated(t *testing.T) {
	u := &api.ContainerUpdate{ContainerId: "c", Linux: &api.LinuxContainerUpdate{Resources: &api.LinuxResources{Devices: []*api.LinuxDeviceCgroup{{Allow: true}}}}}
	if _, err := newUpdate(u); errdefs.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "device rules") {
		t.Error(err)
	}
}

func testUpdatePodShowsOldAndNew(t *testing.T, p *Plugins, plugin *answering) {
	shares := func(n int64) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{CpuShares: n}
	}
	pod := &Pod{ID: "p", Config: &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{Overhead: shares(2), Resources: shares(3)}},
		WantedOverhead: shares(20), WantedResources: shares(30)}
	testutil.Must(t, p.Pod(t.Context(), UpdatePod, pod))
	got := fmt.Sprint(plugin.pod.Linux.PodOverhead.Cpu.Shares.Value, plugin.pod.Linux.PodResources.Cpu.Shares.Value,
		plugin.wanted[0].Cpu.Shares.Value, plugin.wanted[1].Cpu.Shares.Value)
	if got != "2 3 20 30" {
		t.Errorf("the plugin saw %s", got)
	}
}

// A container whose lock is held delays only its updates. Updates of one container are applied in
// order.
func TestUpdatesDoNotWaitForEachOther(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var order []int64
	p := testPlugins(t, testRuntime{update: func(ctx context.Context, u Update) error {
		if u.ContainerID == "busy" {
			<-ctx.Done()
			return ctx.Err()
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if order = append(order, u.Resources.MemoryLimitInBytes); len(order) == 2 {
			cancel() // stops the waiting updates
		}
		return nil
	}})
	p.timeout.Store(int64(time.Minute))
	var updates []*api.ContainerUpdate
	for i, id := range []string{"busy", "free", "free", "busy"} {
		u := &api.ContainerUpdate{ContainerId: id}
		u.SetLinuxMemoryLimit(int64(i))
		updates = append(updates, u)
	}
	failed, err := p.unsolicited(ctx, updates)
	if err != nil || len(failed) != 2 || failed[0] != updates[0] || failed[1] != updates[3] || !slices.Equal(order, []int64{1, 2}) {
		t.Errorf("failed are %v (%v), done %v", failed, err, order)
	}
}

// A panic in a goroutine of the library would end the daemon.
func TestRuntimePanicIsError(t *testing.T) {
	p := testPlugins(t, testRuntime{objects: func() { panic("oh") }, update: func(context.Context, Update) error { panic("ah") }})
	if err := p.synchronize(t.Context(), nil); errdefs.Code(err) != codes.Internal || !strings.Contains(err.Error(), "oh") {
		t.Errorf("synchronize: %v", err)
	}
	if failed, err := p.unsolicited(t.Context(), []*api.ContainerUpdate{{ContainerId: "c"}}); err != nil || len(failed) != 1 {
		t.Errorf("failed are %v (%v)", failed, err)
	}
}

// A plugin's timeout is not reported as the caller's.
func TestTimeoutsNameTheRequest(t *testing.T) {
	p := testPlugins(t, testRuntime{})
	late := func() error { return context.DeadlineExceeded }
	if err := p.relay(t.Context(), "StartContainer", "c1", late); errdefs.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "StartContainer of c1") {
		t.Errorf("the plugin's: %v", err)
	}
	ended, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	if err := p.relay(ended, "StartContainer", "c1", late); errdefs.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "StartContainer of c1") {
		t.Errorf("the caller's: %v", err)
	}
}

func TestNothingIsUpdatedAfterClose(t *testing.T) {
	p := testPlugins(t, testRuntime{update: func(context.Context, Update) error { t.Error("an update"); return nil }})
	p.Close()
	err := p.synchronize(t.Context(), func(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
		return []*api.ContainerUpdate{{ContainerId: "c"}}, nil
	})
	if err := p.own.Wait(context.Background()); err != nil {
		t.Error(err)
	}
	if err != nil {
		t.Error(err)
	}
}

// A socket whose listener is too busy to answer is not replaced.
func TestBusySocketIsNotReplaced(t *testing.T) {
	p := testPlugins(t, testRuntime{})
	if err := p.checkSocket(); err != nil {
		t.Errorf("no socket: %v", err)
	}
	socket := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		testutil.Must(t, err)
		t.Cleanup(func() {
			if err := unix.Close(fd); err != nil {
				t.Error(err)
			}
		})
		return fd
	}
	listener, address := socket(), &unix.SockaddrUnix{Name: p.cfg.Socket}
	testutil.Must(t, unix.Bind(listener, address))
	if err := p.checkSocket(); err != nil {
		t.Errorf("socket without a listener: %v", err)
	}
	err := unix.Listen(listener, 0)
	for err == nil { // until the backlog is full
		err = unix.Connect(socket(), address)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	if err := p.checkSocket(); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("busy listener: %v", err)
	}
}
