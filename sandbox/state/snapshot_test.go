package state

import (
	"slices"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

// A snapshot has the pause's process ID only while the pod is ready.
func TestPodSnapshotHidesStoppedPause(t *testing.T) {
	t.Parallel()
	spec := &PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{Hostname: "h"}}
	for _, phase := range []Phase{PodStarting, PodReady, PodNotReady, PodStopping, PodStopped, Removing, Removed} {
		t.Run(string(phase), func(t *testing.T) {
			status := PodStatus{phase: phase, PausePID: 7, IPs: []string{"10.0.0.7"}}
			p := status.Snapshot(spec)
			if p.Ready() != (phase == PodReady) || (p.PausePID != 0) != (phase == PodReady) || p.ShownConfig() != spec.Config {
				t.Errorf("%+v", p)
			}
			update := &runtimeapi.UpdatePodSandboxResourcesRequest{Resources: &runtimeapi.LinuxContainerResources{CpuShares: 5}}
			status.SetResources(spec.Config, update)
			if p.ShownConfig() != spec.Config || spec.Config.Linux != nil {
				t.Error("the snapshot or the config was changed")
			}
			if shown := status.Snapshot(spec).ShownConfig(); shown.Linux.Resources.CpuShares != 5 || shown.Hostname != "h" {
				t.Errorf("shown config after an update: %v", shown)
			}
		})
	}
}

func TestContainerSnapshots(t *testing.T) {
	t.Parallel()
	started, finished := time.Unix(100, 0), time.Unix(200, 0)
	exit := &Exit{Code: 137, Reason: "OOMKilled", StartedAt: started, FinishedAt: finished}
	spec := &ContainerSpec{ID: "c", PodID: "p", Config: &runtimeapi.ContainerConfig{}, Image: Image{ID: "id", Config: ocispec.ImageConfig{StopSignal: "SIGUSR1"}}}
	for _, test := range []struct {
		phase   Phase
		exit    *Exit
		state   runtimeapi.ContainerState
		pid     int
		started time.Time
	}{
		{ContainerCreating, nil, runtimeapi.ContainerState_CONTAINER_CREATED, 0, time.Time{}},
		{ContainerCreated, nil, runtimeapi.ContainerState_CONTAINER_CREATED, 0, time.Time{}},
		{ContainerStarting, nil, runtimeapi.ContainerState_CONTAINER_CREATED, 0, time.Time{}},
		{ContainerRunning, nil, runtimeapi.ContainerState_CONTAINER_RUNNING, 7, started},
		{ContainerExited, exit, runtimeapi.ContainerState_CONTAINER_EXITED, 0, started},
		{Removing, exit, runtimeapi.ContainerState_CONTAINER_EXITED, 0, started},
	} {
		t.Run(string(test.phase), func(t *testing.T) {
			status := ContainerStatus{phase: test.phase, Exit: test.exit, StartedAt: time.Unix(90, 0)}
			c := status.Snapshot(spec, 7, started)
			if c.State() != test.state || c.PID != test.pid || !c.StartedAt.Equal(test.started) {
				t.Errorf("%v, PID %d, started %v", c.State(), c.PID, c.StartedAt)
			}
			if test.exit != nil && c.Ended() != *exit || test.exit == nil && c.Ended() != (Exit{}) {
				t.Errorf("exit %+v", c.Ended())
			}
			if c.StopSignal() != runtimeapi.Signal_SIGNAL_SIGUSR1 || c.ImageRef() != "id" {
				t.Errorf("stop signal %v, image %s", c.StopSignal(), c.ImageRef())
			}
		})
	}
}

// Each visible step between snapshots is published once. Invisible steps are not published.
func TestEvents(t *testing.T) {
	in := func(phase Phase) *Container {
		return &Container{ContainerSpec: &ContainerSpec{ID: "c", PodID: "p"}, ContainerStatus: NewContainerStatus(phase)}
	}
	pod := &Pod{PodSpec: &PodSpec{ID: "p"}, PodStatus: NewPodStatus(PodReady)}
	notReady := &Pod{PodSpec: pod.PodSpec, PodStatus: NewPodStatus(PodNotReady)}
	created, running, exited := in(ContainerCreated), in(ContainerRunning), in(ContainerExited)
	events := NewEvents(
		func(id string) *Pod {
			if id == pod.ID {
				return pod
			}
			return nil
		},
		func(string) []*Container { return []*Container{running} })
	events.PodChanged(nil, pod)
	events.ContainerChanged(nil, created)
	events.ContainerChanged(created, created) // only its limits changed
	events.ContainerChanged(created, running)
	events.ContainerChanged(running, exited)
	events.ContainerDeleted(nil) // never published
	events.ContainerDeleted(exited)
	events.ContainerDeleted(&Container{ContainerSpec: &ContainerSpec{ID: "d", PodID: "gone"}})
	events.PodChanged(pod, pod)
	events.PodChanged(pod, notReady)
	events.PodDeleted(nil)
	events.PodDeleted(pod)

	wantEvents(t, events, pod, []wantedEvent{
		{runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, "p", true},
		{runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, "p", true},
		{runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, "d", false}, // outlived its pod
		{runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, "p", true},
		{runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, "p", true},
	})
}

// wantedEvent is an event, and whether it has a snapshot of its pod.
type wantedEvent struct {
	kind runtimeapi.ContainerEventType
	id   string
	pod  bool
}

func wantEvents(t *testing.T, events *Events, pod *Pod, want []wantedEvent) {
	t.Helper()
	events.queue.Put(func() Event { return Event{} }) // so that Next has something to return
	got, err := events.queue.Next(t.Context())
	testutil.Must(t, err)
	var described []wantedEvent
	for _, event := range got[:len(got)-1] {
		described = append(described, wantedEvent{event.Type, event.ID, event.Pod == pod})
	}
	if !slices.Equal(described, want) {
		t.Errorf("events are\n%v, want\n%v", described, want)
	}
}

// A new daemon publishes what its predecessor has not published.
func TestEventsContinue(t *testing.T) {
	t.Parallel()
	const created, started, stopped, deleted = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT,
		runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT,
		runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT,
		runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	pod := &Pod{PodSpec: &PodSpec{ID: "p"}, PodStatus: NewPodStatus(PodReady)}
	in := func(phase Phase, ran bool) *Container {
		c := &Container{ContainerSpec: &ContainerSpec{ID: "c", PodID: "p"}, ContainerStatus: NewContainerStatus(phase)}
		if ran {
			c.StartedAt = time.Unix(1, 0)
		}
		return c
	}
	for name, test := range map[string]struct {
		told map[string]runtimeapi.ContainerEventType
		now  *Container // nil: removed
		want []wantedEvent
	}{
		"exited meanwhile":        {told: map[string]runtimeapi.ContainerEventType{"c": started}, now: in(ContainerExited, true), want: []wantedEvent{{stopped, "c", true}}},
		"nothing happened":        {told: map[string]runtimeapi.ContainerEventType{"c": started}, now: in(ContainerRunning, true)},
		"created, ran and exited": {now: in(ContainerExited, true), want: []wantedEvent{{created, "c", true}, {started, "c", true}, {stopped, "c", true}}},
		"exited without a start":  {told: map[string]runtimeapi.ContainerEventType{"c": created}, now: in(ContainerExited, false), want: []wantedEvent{{stopped, "c", true}}},
		"its start was reverted":  {told: map[string]runtimeapi.ContainerEventType{"c": started}, now: in(ContainerCreated, false)},
		"removed":                 {told: map[string]runtimeapi.ContainerEventType{"c": stopped}, want: []wantedEvent{{deleted, "c", true}}},
		"exited and removed":      {told: map[string]runtimeapi.ContainerEventType{"c": started}, want: []wantedEvent{{stopped, "c", true}, {deleted, "c", true}}},
		"removed with its pod": {
			told: map[string]runtimeapi.ContainerEventType{"c": stopped, "q": stopped},
			want: []wantedEvent{{deleted, "c", true}, {deleted, "q", false}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			events := NewEvents(func(id string) *Pod { return map[string]*Pod{"p": pod}[id] }, func(string) []*Container { return nil })
			told := map[string]ToldEvent{"p": {started, "p"}}
			for id, kind := range test.told {
				told[id] = ToldEvent{kind, map[string]string{"c": "p", "q": "q"}[id]}
			}
			events.Continue(told)
			events.PodChanged(nil, pod)
			if test.now != nil {
				events.ContainerChanged(nil, test.now)
			}
			events.Recovered(func(id string) bool { return id == "p" || id == "c" && test.now != nil })
			wantEvents(t, events, pod, test.want)
		})
	}
}

// Recovery publishes a pod with a lost pause as ready, and then as not ready. A client that knows
// of the stop gets no second event. A start that follows a reverted one is new.
func TestEventsAfterRecovery(t *testing.T) {
	t.Parallel()
	const started, stopped = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT
	ready := &Pod{PodSpec: &PodSpec{ID: "p"}, PodStatus: NewPodStatus(PodReady)}
	notReady := &Pod{PodSpec: ready.PodSpec, PodStatus: NewPodStatus(PodNotReady)}
	in := func(phase Phase) *Container {
		return &Container{ContainerSpec: &ContainerSpec{ID: "c", PodID: "p"}, ContainerStatus: NewContainerStatus(phase)}
	}
	created, running, exited := in(ContainerCreated), in(ContainerRunning), in(ContainerExited)
	exited.StartedAt = time.Unix(1, 0)
	ofContainer := []wantedEvent{{started, "c", true}, {stopped, "c", true}}
	for told, want := range map[runtimeapi.ContainerEventType][]wantedEvent{
		started: append([]wantedEvent{{stopped, "p", true}}, ofContainer...),
		stopped: ofContainer,
	} {
		t.Run(told.String(), func(t *testing.T) {
			t.Parallel()
			events := NewEvents(func(string) *Pod { return ready }, func(string) []*Container { return nil })
			events.Continue(map[string]ToldEvent{"p": {told, "p"}, "c": {told, "p"}})
			events.PodChanged(nil, ready)
			events.PodChanged(ready, notReady)
			events.PodChanged(notReady, notReady)
			events.ContainerChanged(nil, created)
			events.ContainerChanged(created, running)
			events.ContainerChanged(running, exited)
			wantEvents(t, events, ready, want)
		})
	}
}

func TestMountsShowImageIDs(t *testing.T) {
	t.Parallel()
	mounts := []*runtimeapi.Mount{
		{ContainerPath: "/a", HostPath: "/b"},
		{ContainerPath: "/v", Image: &runtimeapi.ImageSpec{Image: "name", ImageRef: "made up"}},
	}
	c := &Container{ContainerSpec: &ContainerSpec{Config: &runtimeapi.ContainerConfig{Mounts: mounts}, Volumes: []Volume{{Mount: 1, ImageID: "sha256:1"}}}}
	got := c.Mounts()
	if got[0] != mounts[0] || got[1].Image.Image != "name" || got[1].Image.ImageRef != "sha256:1" {
		t.Errorf("got %v", got)
	}
	if mounts[1].Image.ImageRef != "made up" {
		t.Error("the config was changed")
	}
}
