package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/internal/testutil"
)

// journal records events in order. The lock guards it.
type journal struct {
	mu      sync.Mutex
	entries []string
}

func (j *journal) note(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.entries = append(j.entries, fmt.Sprintf(format, args...))
}

func (j *journal) want(t *testing.T, want ...string) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	if !slices.Equal(j.entries, want) {
		t.Errorf("calls: %q, want %q", j.entries, want)
	}
	j.entries = nil
}

// fakePlugins records its calls.
type fakePlugins struct {
	noPlugins
	*journal
	fail    error
	updates []nri.Update
}

func (f *fakePlugins) Hold() (func(), bool) {
	f.note("hold")
	return func() { f.note("release") }, true
}

func (f *fakePlugins) Pod(_ context.Context, _ nri.PodEvent, pod *nri.Pod) error {
	f.note("pod %s", pod.ID)
	return f.fail
}

func (f *fakePlugins) Container(_ context.Context, _ nri.ContainerEvent, _ *nri.Pod, c *nri.Container) ([]nri.Update, error) {
	f.note("container %s", c.ID)
	return f.updates, f.fail
}

func (f *fakePlugins) CreateContainer(_ context.Context, _ *nri.Pod, c *nri.Container) (*nri.Adjustment, nri.Update, []nri.Update, error) {
	f.note("create %s", c.ID)
	return nil, nri.Update{ContainerID: c.ID}, f.updates, f.fail
}

func (f *fakePlugins) UpdateContainer(_ context.Context, _ *nri.Pod, c *nri.Container, wanted *runtimeapi.LinuxContainerResources) (nri.Update, []nri.Update, error) {
	f.note("update %s", c.ID)
	return nri.Update{ContainerID: c.ID, Resources: &runtimeapi.LinuxContainerResources{CpuShares: wanted.GetCpuShares() + 1}}, nil, f.fail
}

// fakeTarget has one container, c.
type fakeTarget struct{ *journal }

func (fakeTarget) Objects() ([]*nri.Pod, []*nri.Container) { return nil, nil }

func (f fakeTarget) Update(_ context.Context, u nri.Update) error {
	f.note("set %s", u.ContainerID)
	return f.CheckContainer(u.ContainerID)
}

func (f fakeTarget) CheckContainer(id string) error {
	if id != "c" {
		return errdefs.NotFound("container %q does not exist", id)
	}
	return nil
}

func (f fakeTarget) StopContainer(_ context.Context, id string, grace time.Duration) error {
	f.note("stop %s in %v", id, grace)
	return nil
}

// newCaller returns a pluginCaller with a fake plugin, or without any, and a function that waits
// for its background work.
func newCaller(t *testing.T, plugins *fakePlugins) (caller pluginCaller, finish func()) {
	t.Helper()
	caller = pluginCaller{Plugins: noPlugins{}, Tasks: task.NewRunner(slog.New(slog.DiscardHandler), nil), Log: slog.New(slog.DiscardHandler)}
	if plugins != nil {
		caller.Plugins, caller.Target = plugins, fakeTarget{plugins.journal}
	}
	return caller, func() {
		t.Helper()
		caller.Tasks.Operations.Close()
		testutil.Must(t, caller.Tasks.Operations.Wait(t.Context()))
	}
}

func fakePod() *nri.Pod { return &nri.Pod{ID: "p"} }

func fakeContainer() (*nri.Pod, *nri.Container, error) {
	return fakePod(), &nri.Container{ID: "c"}, nil
}

// Without plugins no object is described, because that would take time. done is still called.
func TestWithoutPlugins(t *testing.T) {
	t.Parallel()
	caller, finish := newCaller(t, nil)
	defer finish()
	pod := func() *nri.Pod { t.Error("a pod is described"); return fakePod() }
	container := func() (*nri.Pod, *nri.Container, error) { t.Error("a container is described"); return fakeContainer() }
	release, presented, err := caller.PresentPod(t.Context(), pod)
	release()
	if presented || err != nil {
		t.Errorf("present a pod: %t, %v", presented, err)
	}
	release, presented, changes, err := caller.PresentContainer(t.Context(), container)
	release()
	if presented || changes != nil || err != nil {
		t.Errorf("present a container: %t, %v, %v", presented, changes, err)
	}
	testutil.Must(t, errors.Join(caller.RequestPodUpdate(t.Context(), pod), caller.RequestStart(t.Context(), container)))
	wanted := &runtimeapi.LinuxContainerResources{CpuShares: 5}
	if own, others, err := caller.RequestUpdate(t.Context(), "c", wanted, container); own.ContainerID != "c" || own.Resources != wanted || others != nil || err != nil {
		t.Errorf("update: %v, %v, %v", own, others, err)
	}
	caller.NotifyPod(t.Context(), nri.PodStopped, pod)
	done := false
	caller.NotifyContainer(t.Context(), nri.ContainerStopped, "c", container, func() { done = true })
	if !done {
		t.Error("done was not called")
	}
}

// PresentPod and PresentContainer keep the hold until the object is published. All other calls
// release it when they return.
func TestHoldLastsUntilPublication(t *testing.T) {
	t.Parallel()
	f := &fakePlugins{journal: &journal{}}
	caller, finish := newCaller(t, f)
	defer finish()
	release, presented, err := caller.PresentPod(t.Context(), fakePod)
	f.want(t, "hold", "pod p")
	release()
	if !presented || err != nil {
		t.Errorf("present a pod: %t, %v", presented, err)
	}
	f.want(t, "release")

	release, presented, changes, err := caller.PresentContainer(t.Context(), fakeContainer)
	f.want(t, "hold", "create c")
	release()
	if !presented || err != nil || changes.Own.ContainerID != "c" {
		t.Errorf("present a container: %t, %v, %v", presented, changes, err)
	}
	f.want(t, "release")

	testutil.Must(t, errors.Join(caller.RequestPodUpdate(t.Context(), fakePod), caller.RequestStart(t.Context(), fakeContainer)))
	f.want(t, "hold", "pod p", "release", "hold", "container c", "release")
	own, _, err := caller.RequestUpdate(t.Context(), "c", &runtimeapi.LinuxContainerResources{CpuShares: 5}, fakeContainer)
	if own.Resources.GetCpuShares() != 6 || err != nil {
		t.Errorf("update: %v, %v", own, err)
	}
	f.want(t, "hold", "update c", "release")

	// done runs during the hold. A plugin that registers between the notification and done would
	// get the container, but never its stop.
	caller.NotifyContainer(t.Context(), nri.ContainerStopped, "c", fakeContainer, func() { f.note("done") })
	f.want(t, "hold", "container c", "done", "release")
}

// A refused request is an error, and the hold is kept. A refused notification has no effect.
func TestPluginErrors(t *testing.T) {
	t.Parallel()
	f := &fakePlugins{journal: &journal{}, fail: errdefs.FailedPrecondition("no")}
	caller, finish := newCaller(t, f)
	defer finish()
	releasePod, presented, err := caller.PresentPod(t.Context(), fakePod)
	if !presented || errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("present a pod: %t, %v", presented, err)
	}
	releasePod()
	releaseContainer, presented, changes, err := caller.PresentContainer(t.Context(), fakeContainer)
	if !presented || changes != nil || errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("present a container: %t, %v, %v", presented, changes, err)
	}
	releaseContainer()
	if err := caller.RequestStart(t.Context(), fakeContainer); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("start: %v", err)
	}
	if err := caller.RequestPodUpdate(t.Context(), fakePod); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("update of a pod: %v", err)
	}
	f.want(t, "hold", "pod p", "release", "hold", "create c", "release", "hold", "container c", "release", "hold", "pod p", "release")
	done := false
	caller.NotifyPod(t.Context(), nri.PodStopped, fakePod)
	caller.NotifyContainer(t.Context(), nri.ContainerStopped, "c", fakeContainer, func() { done = true })
	if !done {
		t.Error("done was not called after a failure")
	}
}

// Updates of other containers are applied after the hold. A failed update does not prevent the
// others.
func TestUpdatesRunAfterHold(t *testing.T) {
	t.Parallel()
	f := &fakePlugins{journal: &journal{}, updates: []nri.Update{{ContainerID: "gone"}, {ContainerID: "c"}}}
	caller, finish := newCaller(t, f)
	caller.NotifyContainer(t.Context(), nri.ContainerStarted, "c", fakeContainer, func() {})
	finish()
	slices.Sort(f.entries) // the updates run in another goroutine
	f.want(t, "container c", "hold", "release", "set c", "set gone")
}

func TestUpdateOthersErrors(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		updates []nri.Update
		want    codes.Code
		done    []string
	}{
		"none":                          {nil, codes.OK, nil},
		"all":                           {[]nri.Update{{ContainerID: "c"}}, codes.OK, []string{"set c"}},
		"optional update fails":         {[]nri.Update{{ContainerID: "gone", IgnoreFailure: true}, {ContainerID: "c"}}, codes.OK, []string{"set gone", "set c"}},
		"mandatory update fails":        {[]nri.Update{{ContainerID: "gone"}, {ContainerID: "c"}}, codes.NotFound, []string{"set gone"}},
		"eviction":                      {[]nri.Update{{ContainerID: "c", Evict: true}}, codes.OK, []string{"stop c in 30s"}},
		"eviction of unknown container": {[]nri.Update{{ContainerID: "gone", Evict: true}}, codes.NotFound, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakePlugins{journal: &journal{}}
			caller, finish := newCaller(t, f)
			err := caller.UpdateOthers(t.Context(), test.updates)
			finish()
			if got := errdefs.Code(err); got != test.want {
				t.Errorf("%v (%v), want %v", got, err, test.want)
			}
			f.want(t, test.done...)
		})
	}
}

func TestEvictionFailsDuringShutdown(t *testing.T) {
	t.Parallel()
	f := &fakePlugins{journal: &journal{}}
	caller, finish := newCaller(t, f)
	finish()
	err := caller.UpdateOthers(t.Context(), []nri.Update{{ContainerID: "c", Evict: true}})
	if errdefs.Code(err) != codes.Unavailable {
		t.Errorf("got %v, want Unavailable", err)
	}
}
