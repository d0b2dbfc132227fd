package server

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/lazy"
	"berth/image/profile"
	"berth/image/pull"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/internal/trace"
	"berth/sandbox/history"
	"berth/sandbox/state"
	"berth/sandbox/stream"
	"berth/server/admin"
)

// fakePods is a Sandboxes in memory. Its answers show the effects of calls, and calls records other
// requests. A test sets hook so that a method fails, blocks or panics.
type fakePods struct {
	hook func(ctx context.Context, method string) error

	mu         sync.Mutex
	pods       []*state.Pod
	containers []*state.Container
	calls      []string
	exec       stream.Result
	network    error
	runtime    error
	waits      []task.Wait
	traces     []trace.Operation
	events     eventsFake
	stats      statsFake
}

func (f *fakePods) call(ctx context.Context, method string, args ...any) error {
	f.mu.Lock()
	f.calls = append(f.calls, method+fmt.Sprint(args...))
	f.mu.Unlock()
	if f.hook != nil {
		return f.hook(ctx, method)
	}
	return nil
}

func (f *fakePods) called() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

func (f *fakePods) RestorePod(ctx context.Context, r state.RestoreRequest) (string, []state.Restored, error) {
	if err := f.call(ctx, "RestorePod ", r.Path, " ", r.Handler, len(r.Containers)); err != nil {
		return "", nil, err
	}
	restored := make([]state.Restored, len(r.Containers))
	for i, c := range r.Containers {
		restored[i] = state.Restored{Name: c.GetMetadata().GetName(), ID: fmt.Sprint("c", i)}
	}
	return "p1", restored, nil
}

func (f *fakePods) RunPodSandbox(ctx context.Context, cfg *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	if err := f.call(ctx, "RunPodSandbox"); err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	p := testPod{ID: fmt.Sprintf("pod%d", len(f.pods)), Config: cfg, Handler: handler, Ready: true, CreatedAt: time.Unix(1, int64(len(f.pods)))}.snapshot()
	f.pods = append(f.pods, p)
	return p.ID, nil
}

func (f *fakePods) StopPodSandbox(ctx context.Context, id string) error {
	return f.call(ctx, "StopPodSandbox", id)
}

func (f *fakePods) RemovePodSandbox(ctx context.Context, id string) error {
	return f.call(ctx, "RemovePodSandbox", id)
}

func (f *fakePods) Pod(id string) (*state.Pod, error) {
	for _, p := range f.Pods() {
		if p.ID == id {
			return p, nil
		}
	}
	return nil, errdefs.NotFound("pod sandbox %q does not exist", id)
}

func (f *fakePods) Pods() []*state.Pod {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.pods)
}

func (f *fakePods) CreateContainer(
	ctx context.Context, podID string, cfg *runtimeapi.ContainerConfig, _ *runtimeapi.PodSandboxConfig,
) (string, error) {
	if err := f.call(ctx, "CreateContainer", podID); err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := testContainer{ID: fmt.Sprintf("ctr%d", len(f.containers)), PodID: podID, Config: cfg, ImageID: idA, CreatedAt: time.Unix(2, int64(len(f.containers)))}.snapshot()
	f.containers = append(f.containers, c)
	return c.ID, nil
}

func (f *fakePods) StartContainer(ctx context.Context, id string) error {
	return f.call(ctx, "StartContainer", id)
}

func (f *fakePods) StopContainer(ctx context.Context, id string, timeout time.Duration) error {
	return f.call(ctx, "StopContainer", id, " ", timeout)
}

func (f *fakePods) RemoveContainer(ctx context.Context, id string) error {
	return f.call(ctx, "RemoveContainer", id)
}

func (f *fakePods) RuntimeSpec(_ context.Context, id string) (*specs.Spec, error) {
	if _, err := f.Container(id); err != nil {
		return nil, err
	}
	return &specs.Spec{Version: specs.Version}, nil
}

func (f *fakePods) Container(id string) (*state.Container, error) {
	for _, c := range f.Containers() {
		if c.ID == id {
			return c, nil
		}
	}
	return nil, errdefs.NotFound("container %q does not exist", id)
}

func (f *fakePods) Containers() []*state.Container {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.containers)
}

func (f *fakePods) ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*stream.Result, error) {
	if err := f.call(ctx, "ExecSync", id, " ", cmd, " ", timeout); err != nil {
		return nil, err
	}
	return &f.exec, nil
}

func (f *fakePods) UpdateContainerResources(ctx context.Context, id string, r *runtimeapi.LinuxContainerResources) error {
	return f.call(ctx, "UpdateContainerResources", id, " ", r.GetMemoryLimitInBytes())
}

func (f *fakePods) CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error {
	return f.call(ctx, "CheckpointContainer", id, " ", location, " ", timeout)
}

func (f *fakePods) CheckpointPod(ctx context.Context, podID, output string, ids []string, options map[string]string) error {
	return f.call(ctx, "CheckpointPod", podID, " ", output, " ", ids, " ", options)
}

func (f *fakePods) ReopenContainerLog(ctx context.Context, id string) error {
	return f.call(ctx, "ReopenContainerLog", id)
}

func (f *fakePods) NetworkStatus(context.Context) error { return f.network }

func (f *fakePods) UpdatePodCIDR(ctx context.Context, cidrs string) error {
	return f.call(ctx, "UpdatePodCIDR", cidrs)
}

func (f *fakePods) Waits() []task.Wait { return f.waits }

func (f *fakePods) StartOf(string) []trace.Operation { return f.traces }

func (f *fakePods) RecordPull(*runtimeapi.PodSandboxMetadata, string, *trace.Trace) {}

func (f *fakePods) Starts() []history.Summary { return nil }

func (f *fakePods) Start(string) (history.Start, error) { return history.Start{}, nil }

const (
	idA = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	idB = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
)

// fakeImages is a store with fixed images. Pull returns one of them.
type fakeImages struct {
	admin.Store
	images   []*image.Image
	removed  []string
	auth     *runtimeapi.AuthConfig
	profiles *profile.Store
	err      error // returned by every method that may fail
	progress []pull.Progress
	lazy     *lazy.Status // of all images
}

func (f *fakeImages) PullFor(_ context.Context, _, ref string, auth *runtimeapi.AuthConfig) (*image.Image, error) {
	f.auth = auth
	return f.Get(ref)
}

func (f *fakeImages) Get(ref string) (*image.Image, error) {
	if f.err != nil {
		return nil, f.err
	}
	for _, img := range f.images {
		if img.ID == ref || slices.Contains(img.RepoTags, ref) {
			return img, nil
		}
	}
	return nil, errdefs.NotFound("image %q does not exist", ref)
}

func (f *fakeImages) PullProfile(context.Context, string, string, *runtimeapi.AuthConfig) (bool, error) {
	return false, f.err
}

func (f *fakeImages) Profiles() *profile.Store { return f.profiles }

func (f *fakeImages) Driver() rootfs.Kind { return rootfs.Directory }

func (f *fakeImages) List() []*image.Image { return f.images }

func (f *fakeImages) Remove(_ context.Context, ref string) error {
	f.removed = append(f.removed, ref)
	return f.err
}

func (f *fakeImages) Usage(context.Context) (image.Usage, error) {
	return image.Usage{Mountpoint: "/var/lib/berth/images", Bytes: 7, Inodes: 3}, f.err
}

func (f *fakeImages) LazyStatus(*image.Image) *lazy.Status { return f.lazy }

func (f *fakeImages) Fetched(*image.Image) string {
	if f.lazy == nil {
		return ""
	}
	return f.lazy.Percent()
}

func (f *fakeImages) Progress() []pull.Progress { return f.progress }

// idsOf returns the IDs of a list's items in order.
func idsOf[T interface{ GetId() string }](items []T) string {
	var ids []string
	for _, item := range items {
		ids = append(ids, item.GetId())
	}
	return strings.Join(ids, " ")
}

// harness is a served Server and a client connected to it.
type harness struct {
	server  *Server
	path    string
	log     *testutil.Buffer
	conn    *grpc.ClientConn
	runtime runtimeapi.RuntimeServiceClient
	images  runtimeapi.ImageServiceClient
	stop    func() error // stops Serve and returns its result
}

var testConfig = Config{Version: "1.2.3", Settings: func() any { return map[string]int{"max_log_line": 42} }, Sessions: &fakeSessions{}}

func emptyProfiles(t testing.TB) *profile.Store {
	t.Helper()
	store, _, err := profile.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// withEvents adds an empty journal of events, unless the configuration has one.
func withEvents(t testing.TB, cfg Config) Config {
	t.Helper()
	if cfg.Events == nil {
		cfg.Events = OpenEventLog(t.TempDir(), discardLog)
	}
	return cfg
}

// start serves pods and images on a socket in a temporary directory.
func start(t testing.TB, cfg Config, pods Sandboxes, images Images) *harness {
	t.Helper()
	l, err := Listen(filepath.Join(t.TempDir(), "berth.sock"))
	testutil.Must(t, err)
	return startOn(t, l, cfg, pods, images)
}

func startOn(t testing.TB, l net.Listener, cfg Config, pods Sandboxes, images Images) *harness {
	if fake, ok := images.(*fakeImages); ok && fake.profiles == nil {
		fake.profiles = emptyProfiles(t)
	}
	t.Helper()
	h := &harness{path: l.Addr().String(), log: new(testutil.Buffer)}
	log := slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	h.server = New(withEvents(t, cfg), pods, images, log)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var served error
	go func() {
		defer close(ended)
		served = h.server.Serve(ctx, l)
	}()
	h.stop = func() error {
		cancel()
		<-ended
		return served
	}
	h.conn = dial(t, h.path)
	h.runtime, h.images = runtimeapi.NewRuntimeServiceClient(h.conn), runtimeapi.NewImageServiceClient(h.conn)
	t.Cleanup(func() {
		if err := cmp.Or(h.conn.Close(), h.stop()); err != nil {
			t.Error(err)
		}
	})
	return h
}

// dial connects with kubelet's limits of messages.
func dial(t testing.TB, path string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, append(options,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(4*MaxMessage)))...)
	testutil.Must(t, err)
	return conn
}
