package sandbox

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/checkpoint/record"
	"berth/cni"
	"berth/image"
	"berth/internal/criu"
	"berth/internal/errdefs"
	"berth/internal/pidfd"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/oci"
	"berth/oci/users"
	"berth/sandbox/handler"
	"berth/sandbox/lsm"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// fakeHost implements all interfaces through which the manager commands the host. It logs each call
// in calls, and fails the calls that a test selects. It keeps records in memory. The lock guards
// all fields.
type fakeHost struct {
	t  *testing.T
	mu sync.Mutex

	calls      []string
	fail       map[string]int             // remaining failures of each call
	hangs      bool                       // RuntimeSpec waits for a volume until its context ends
	planned    *specs.Spec                // that the last launch got; nil: it built one
	holdDumps  bool                       // Prepare waits until it is cancelled
	pods       map[string]state.Phase     // by ID, as recorded
	containers map[string]state.Phase     // by ID, as recorded
	loaded     func(*fakeHost, *fakeLoad) // adds the records of an earlier daemon
	running    map[string]proto.PIDs      // shims that Find finds
	ended      map[string]chan struct{}   // by container: closed when its shim has ended
	kind       proto.PauseKind            // planned kind of all pauses
	kinds      []string                   // log of the steps that got a kind of pause
	layers     []digest.Digest            // of all images
	launched   func()                     // called at the end of each launch, if not nil
	incomplete bool                       // all layers are incomplete
	unusable   atomic.Pointer[error]      // of Usable
	thawing    func()                     // called with each thaw; may be nil
	savedBy    string                     // the runtime in the manifest of the checkpoint, which then has one container
	holdSave   chan struct{}              // if not nil, SaveSandbox waits for it
	detachTime time.Duration              // of each Detach
	tasks      *task.Runner
}

// fakeLoad collects the records of an earlier daemon.
type fakeLoad struct {
	pods       []*pod
	containers []*container
}

// errFake is the error of each failing call.
var errFake = errdefs.Unavailable("the fake host fails")

// call logs a call and returns its error.
func (f *fakeHost) call(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, name)
	if f.fail[name] == 0 {
		return nil
	}
	f.fail[name]--
	return errFake
}

// failing makes the next n calls fail.
func (f *fakeHost) failing(name string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail[name] = n
}

// forget clears the log of calls.
func (f *fakeHost) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = nil
}

func (f *fakeHost) called(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.calls, name)
}

func (f *fakeHost) recordedPod(id string) state.Phase {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pods[id]
}

func (f *fakeHost) recordedContainer(id string) state.Phase {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.containers[id]
}

func (f *fakeHost) podRecords() map[string]state.Phase {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.pods)
}

func (f *fakeHost) containerRecords() map[string]state.Phase {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.containers)
}

// process returns a pidfd of a process that outlives the test.
func (f *fakeHost) process() *os.File {
	file, err := pidfd.Open(os.Getpid())
	testutil.Must(f.t, err)
	return file
}

// Starter

func (f *fakeHost) PlanPause(context.Context, *state.Pod) (proto.PauseKind, *specs.Spec, error) {
	f.noteKind("plan", f.kind)
	return f.kind, nil, f.call("plan pause")
}

// noteKind logs the kind of pause that a step got.
func (f *fakeHost) noteKind(step string, kind proto.PauseKind) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kinds = append(f.kinds, fmt.Sprintf("%s %s", step, kind))
}

func (f *fakeHost) Pause(_ context.Context, pod *state.Pod, _ *specs.Spec) (*proto.Started, error) {
	f.noteKind("launch", pod.Pause)
	if err := f.call("launch pause"); err != nil {
		return nil, err
	}
	return &proto.Started{Init: f.process(), PIDs: proto.PIDs{InitPID: 77, InitStartTime: 7}}, nil
}

func (f *fakeHost) Root(context.Context, *state.Pod, *state.Container) (rootfs.Spec, error) {
	return rootfs.Spec{}, f.call("make root filesystem")
}

func (f *fakeHost) User(context.Context, *state.Container, rootfs.Spec) (users.User, error) {
	return users.User{UID: 5}, f.call("resolve user")
}

func (f *fakeHost) MakeVolumes(context.Context, *state.Container, rootfs.Spec) ([]oci.AnonymousVolume, error) {
	return nil, f.call("make volumes")
}

func (f *fakeHost) Validate(context.Context, *state.Pod, *state.Container, func() (string, error)) (*specs.Spec, error) {
	return &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{Resources: &specs.LinuxResources{}}}, f.call("validate")
}

func (f *fakeHost) RuntimeSpec(ctx context.Context, _ *state.Pod, _ *state.Container, _ func() (string, error)) (*specs.Spec, error) {
	if f.hangs {
		<-ctx.Done()
		return nil, fmt.Errorf("mount of /data: %w", ctx.Err())
	}
	return &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{Resources: &specs.LinuxResources{}}}, f.call("spec")
}

func (f *fakeHost) Start(
	_ context.Context, _ *state.Pod, c *state.Container, planned *specs.Spec, _ func() (string, error),
) (*proto.Started, error) {
	f.planned = planned
	if err := f.call("launch"); err != nil {
		return nil, err
	}
	f.shimEnd(c.ID)
	if f.launched != nil {
		f.launched()
	}
	return &proto.Started{Init: f.process(), Shim: f.process(), PIDs: proto.PIDs{InitPID: 78, StartedAt: time.Now()}}, nil
}

func (f *fakeHost) Describe(context.Context, *state.Pod, *state.Container, func() (string, error), *atomic.Bool) (*specs.Spec, error) {
	return nil, f.call("describe")
}

// shimEnd returns the channel that is closed when the container's shim has ended.
func (f *fakeHost) shimEnd(id string) chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended[id] == nil {
		f.ended[id] = make(chan struct{})
	}
	return f.ended[id]
}

// Processes

func (f *fakeHost) Find(_ context.Context, id string) (*runtime.Running, proto.PIDs, error) {
	err := f.call("find shim")
	f.mu.Lock()
	ids, found := f.running[id]
	f.mu.Unlock()
	if err != nil || !found {
		return nil, ids, err
	}
	return runtime.Launched(&proto.Started{Init: f.process(), Shim: f.process(), PIDs: ids}), ids, nil
}

func (f *fakeHost) AwaitEnd(*os.File, string) bool {
	<-f.tasks.Watchers.Context().Done()
	return false
}

func (f *fakeHost) AwaitMonitor(_ *runtime.Running, object string) bool {
	select {
	case <-f.shimEnd(strings.TrimPrefix(object, "shim of container ")):
		return true
	case <-f.tasks.Watchers.Context().Done():
		return false
	}
}

func (f *fakeHost) ReadExit(_ context.Context, _ string, startedAt time.Time) (state.Exit, bool, error) {
	exit := state.Exit{Code: state.CodeUnknown, Reason: state.ReasonShimLost, StartedAt: startedAt}
	return exit, true, f.call("read exit")
}

func (f *fakeHost) LogLost(string) {}

func (f *fakeHost) End(context.Context, *os.File) error { return f.call("kill pause") }

func (f *fakeHost) KillLeftBehind(context.Context, string, string) error {
	return f.call("kill left behind")
}

func (f *fakeHost) Remove(ctx context.Context, _, _ string) error {
	return errors.Join(f.call("remove processes"), ctx.Err())
}

func (f *fakeHost) RemoveByID(context.Context, string) error { return f.call("remove by ID") }
func (f *fakeHost) RemoveRoot(string) error                  { return f.call("remove runtime state") }

// Stopper

func (f *fakeHost) Stop(ctx context.Context, c runtime.StopTarget, run *runtime.Running, _ unix.Signal, _ time.Duration) error {
	if err := f.call("stop"); err != nil {
		return err
	}
	return f.endMonitor(ctx, c.ID, run)
}

func (f *fakeHost) Kill(ctx context.Context, c runtime.StopTarget) error {
	run := c.Running()
	if run == nil {
		return nil
	}
	if err := f.call("kill"); err != nil {
		return err
	}
	return f.endMonitor(ctx, c.ID, run)
}

// endMonitor ends the shim of a container and waits until its exit is published.
func (f *fakeHost) endMonitor(ctx context.Context, id string, run *runtime.Running) error {
	ended := f.shimEnd(id)
	f.mu.Lock()
	select {
	case <-ended:
	default:
		close(ended)
	}
	f.mu.Unlock()
	select {
	case <-run.Exited:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *fakeHost) Settle(_ runtime.StopTarget, startedAt time.Time) (state.Exit, bool) {
	return state.Exit{Code: 137, Reason: state.ReasonError, StartedAt: startedAt, FinishedAt: time.Now()}, true
}

func (f *fakeHost) SettleLost(_ runtime.StopTarget, exit state.Exit) (state.Exit, bool) {
	return exit, true
}

// Images and Volumes

func (f *fakeHost) Get(ref string) (*image.Image, error) {
	return &image.Image{ID: "sha256:" + ref, Layers: f.layers}, f.call("find image")
}

func (f *fakeHost) Hold(string, []digest.Digest) (rootfs.Spec, error) {
	return rootfs.Spec{}, f.call("hold layers")
}

func (f *fakeHost) Release(string) error { return f.call("release layers") }

func (f *fakeHost) Verify(context.Context, *image.Image, string, string) error { return nil }

func (f *fakeHost) FindVolumes(context.Context, string, *runtimeapi.ContainerConfig) ([]state.Volume, error) {
	return nil, f.call("find volumes")
}

func (f *fakeHost) HoldVolumes(string, *runtimeapi.ContainerConfig, []state.Volume) ([]proto.Volume, error) {
	return nil, f.call("hold volumes")
}

func (f *fakeHost) ReleaseVolumes(string, []state.Volume) error { return f.call("release volumes") }

func (f *fakeHost) PauseImage(context.Context, string) (*state.Image, error) {
	return &state.Image{}, f.call("find pause image")
}

// Restores

func (f *fakeHost) Import(context.Context, string, string) (*archive.Archive, error) {
	containers := []archive.Container{{Name: "main"}, {Name: "side"}}
	if f.savedBy != "" {
		containers = containers[:1]
	}
	manifest := archive.Manifest{Pod: &archive.Pod{}, Containers: containers, Runtime: f.savedBy}
	return &archive.Archive{Manifest: manifest}, f.call("import")
}

func (f *fakeHost) Compare(context.Context, *archive.Archive, *state.Container, *specs.Spec) error {
	return f.call("compare")
}

func (f *fakeHost) FillLayer(context.Context, *state.Container, rootfs.Spec) error {
	return f.call("fill layer")
}

func (f *fakeHost) FillShm(context.Context, string, string) error { return f.call("fill shm") }

// Pool

func (f *fakeHost) Expect()                          {}
func (f *fakeHost) Counts() shim.Counts              { return shim.Counts{} }
func (f *fakeHost) ExpectPause(kind proto.PauseKind) { f.noteKind("expect", kind) }
func (f *fakeHost) Close() error                     { return nil }

// fakeNetwork implements Network. Its method names collide with those of fakeHost.
type fakeNetwork struct{ *fakeHost }

func (f fakeNetwork) Status(context.Context) error                      { return f.call("network status") }
func (f fakeNetwork) SetPodCIDR(context.Context, string) error          { return f.call("set pod CIDR") }
func (f fakeNetwork) Load() ([]record.Damaged, error)                   { return nil, f.call("load pod CIDR") }
func (f fakeNetwork) Forget(string) error                               { return f.call("forget network") }
func (f fakeNetwork) Collect(context.Context, iter.Seq[*state.PodSpec]) {}
func (f fakeNetwork) Leave()                                            {}
func (f fakeNetwork) OnChange(func())                                   {}

func (f fakeNetwork) Plan(*state.PodSpec) (cni.Attachment, [][]cni.IPRange, error) {
	return cni.Attachment{Network: "net"}, nil, f.call("plan network")
}

func (f fakeNetwork) Attach(context.Context, *state.PodSpec, *cni.Attachment) ([]string, error) {
	return []string{"10.0.0.2"}, f.call("attach")
}

func (f fakeNetwork) Detach(context.Context, *state.PodSpec, cni.Attachment) error {
	time.Sleep(f.detachTime)
	return f.call("detach")
}

// fakeEnvironment implements Environment.
type fakeEnvironment struct{ *fakeHost }

func (f fakeEnvironment) Make(context.Context, *state.PodSpec) error { return f.call("make files") }
func (f fakeEnvironment) RemoveNetNS(string) error                   { return f.call("remove netns") }
func (f fakeEnvironment) RemoveMounts(string) error                  { return f.call("remove mounts") }
func (f fakeEnvironment) Remove(string) error                        { return f.call("remove files") }

func (f fakeEnvironment) FinishFiles(context.Context, *state.PodSpec, []string) error {
	return f.call("write hosts")
}

func (f fakeEnvironment) Unrecorded(func(string) bool) (map[string]bool, error) {
	return nil, f.call("find orphans")
}

func (f fakeEnvironment) RemoveUnrecorded(context.Context, string) error {
	return f.call("remove orphan")
}

// fakeRecords keeps records in memory. Write calls have the name of the recorded phase.
type fakeRecords struct{ *fakeHost }

func (f fakeRecords) WritePod(spec *state.PodSpec, status *state.PodStatus) error {
	f.noteKind("record", spec.Pause)
	if err := f.call(fmt.Sprintf("record pod %s", status.Phase())); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pods[spec.ID] = status.Phase()
	return nil
}

func (f fakeRecords) WriteContainer(spec *state.ContainerSpec, status *state.ContainerStatus) error {
	if err := f.call(fmt.Sprintf("record container %s", status.Phase())); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.containers[spec.ID] = status.Phase()
	return nil
}

func (f fakeRecords) RemovePod(id string) error {
	if err := f.call("remove pod record"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pods, id)
	return nil
}

func (f fakeRecords) RemoveContainer(id string) error {
	if err := f.call("remove container record"); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.containers, id)
	return nil
}

func (f fakeRecords) load() *fakeLoad {
	found := &fakeLoad{}
	if f.loaded != nil {
		f.loaded(f.fakeHost, found)
	}
	return found
}

func (f fakeRecords) LoadPods(add func(*state.PodSpec, state.PodStatus)) ([]record.Damaged, error) {
	if err := f.call("load pods"); err != nil {
		return nil, err
	}
	for _, p := range f.load().pods {
		f.pods[p.ID] = p.status.Unshared().Phase()
		add(p.PodSpec, *p.status.Unshared())
	}
	return nil, nil
}

func (f fakeRecords) LoadContainers(add func(*state.ContainerSpec, state.ContainerStatus)) ([]record.Damaged, error) {
	if err := f.call("load containers"); err != nil {
		return nil, err
	}
	for _, c := range f.load().containers {
		f.containers[c.ID] = c.status.Unshared().Phase()
		add(c.ContainerSpec, *c.status.Unshared())
	}
	return nil, nil
}

// LayersOf implements Images.
func (f *fakeHost) LayersOf(*image.Image) []image.LayerUse { return nil }

// Keep implements Images.
func (f *fakeHost) Keep([]digest.Digest) []*os.File {
	if f.incomplete {
		return []*os.File{os.Stdin, os.Stdin}
	}
	return nil
}

// Complete implements Images.
func (f *fakeHost) Complete([]digest.Digest) bool { return !f.incomplete }

func (f *fakeHost) Usable([]digest.Digest) error {
	if err := f.unusable.Load(); err != nil {
		return *err
	}
	return nil
}

// fakeDumper dumps nothing.
type fakeDumper struct{ *fakeHost }

func (f fakeDumper) EndLeft(func(string) string) error { return f.call("end left dumps") }

func (f fakeDumper) Prepare(ctx context.Context, id string, dir *os.File) (runtime.Dump, error) {
	if err := f.call("prepare dump"); err != nil {
		return nil, err
	}
	if f.holdDumps {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return fakeDump{f.fakeHost, dir}, nil
}

func (f fakeDumper) Freeze(context.Context, string, string, time.Duration) (runtime.Frozen, error) {
	if err := f.call("freeze"); err != nil {
		return nil, err
	}
	return fakeFrozen(f), nil
}

// SaveSandbox writes the files that the archive of a sandbox must have.
func (f fakeDumper) SaveSandbox(_ context.Context, _ *state.PodSpec, _ *state.ContainerSpec, dir *os.File) error {
	if err := f.call("save sandbox"); err != nil {
		return err
	}
	if f.holdSave != nil {
		<-f.holdSave
	}
	images := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), archive.ImagesDir)
	return errors.Join(os.Mkdir(images, 0o700), os.WriteFile(filepath.Join(images, archive.SandboxFile), nil, 0o600))
}

func (f fakeDumper) Thaw(string) error { return f.call("thaw directly") }

type fakeDump struct {
	*fakeHost
	dir *os.File
}

// Run writes the files that an archive must have.
func (f fakeDump) Run(ctx context.Context) error {
	if err := errors.Join(f.call("dump"), ctx.Err()); err != nil {
		return err
	}
	images := fmt.Sprintf("/proc/self/fd/%d/%s", f.dir.Fd(), archive.ImagesDir)
	err := os.Mkdir(images, 0o700)
	for _, name := range []string{"inventory.img", archive.DescriptorsFile} {
		err = errors.Join(err, os.WriteFile(filepath.Join(images, name), []byte("[]"), 0o600))
	}
	return err
}

func (f fakeDump) Close() error     { return f.call("end dump") }
func (fakeDump) Info() proto.Dumped { return proto.Dumped{CRIU: criu.Minimum} }

type fakeFrozen struct{ *fakeHost }

func (f fakeFrozen) Lost() <-chan struct{} { return nil }

func (f fakeFrozen) Thaw() error {
	if f.thawing != nil {
		f.thawing()
	}
	return f.call("thaw")
}

// fakeTrash deletes nothing.
type fakeTrash struct{ *fakeHost }

func (f fakeTrash) Discard(string) error { return f.call("discard layer") }
func (f fakeTrash) Run(context.Context)  {}

func (f fakeTrash) Since() (wait func(context.Context)) {
	return func(context.Context) { _ = f.call("wait for deletion") }
}

// withFakes runs a test with a manager on a fake host. Time is virtual, so retries take no time.
// The manager is closed at the end, and all its goroutines must end.
func withFakes(t *testing.T, test func(t *testing.T, m *Manager, f *fakeHost)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(slog.DiscardHandler)
		tasks := task.NewRunner(log, nil)
		config := Config{Root: t.TempDir(), Handler: "berth", Restores: state.RestoreTrusted, Log: log}
		f := &fakeHost{t: t, fail: map[string]int{}, pods: map[string]state.Phase{}, containers: map[string]state.Phase{},
			running: map[string]proto.PIDs{}, ended: map[string]chan struct{}{}, tasks: tasks}
		handlers, err := handler.Open(t.Context(), handler.Options{BuiltIn: "berth", Tasks: tasks, Log: log})
		testutil.Must(t, err)
		dirs := state.Dirs{Root: t.TempDir(), State: t.TempDir(), NetNSs: t.TempDir()}
		m := newManager(config, &parts{
			node:      state.Node{Dirs: dirs, SystemdCgroup: true},
			bootID:    "boot",
			run:       state.Run{ID: "run"},
			launcher:  f,
			processes: f,
			stopper:   f,
			images:    f,
			volumes:   f,
			pool:      f,
			restores:  f,
			network:   fakeNetwork{f},
			podenv:    fakeEnvironment{f},
			records:   fakeRecords{f},
			trash:     fakeTrash{f},
			dumper:    fakeDumper{f},
			handlers:  handlers,
			appArmor:  lsm.NewAppArmor(false, tasks, log),
			key:       loadOnce(func() (*archive.Key, error) { return archive.LoadKey(dirs.Root) }),
		}, tasks)
		test(t, m, f)
		if err := m.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

func podConfig() *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u"}}
}

func containerConfig() *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, Image: &runtimeapi.ImageSpec{Image: "busybox"}}
}

func runPod(t *testing.T, m *Manager) (id string) {
	t.Helper()
	id, err := m.RunPodSandbox(t.Context(), podConfig(), "")
	testutil.Must(t, err)
	return id
}

func createContainer(t *testing.T, m *Manager, podID string) (id string) {
	t.Helper()
	id, err := m.CreateContainer(t.Context(), podID, containerConfig(), nil)
	testutil.Must(t, err)
	return id
}

// startContainer creates and starts a container.
func startContainer(t *testing.T, m *Manager, podID string) (id string) {
	t.Helper()
	id = createContainer(t, m, podID)
	testutil.Must(t, m.StartContainer(t.Context(), id))
	return id
}

// wantFailure checks that an error has the code of the failing call.
func wantFailure(t *testing.T, err error) {
	t.Helper()
	if errdefs.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want the failing call's error with code Unavailable", err)
	}
}

// wantCalled checks that these calls were made, or that they were not.
func wantCalled(t *testing.T, f *fakeHost, want bool, names ...string) {
	t.Helper()
	for _, name := range names {
		if f.called(name) != want {
			t.Errorf("call %q: made %t, want %t", name, !want, want)
		}
	}
}
