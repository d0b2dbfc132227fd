package state

import (
	"context"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/feed"
)

// A pause's process ID is shown only as long as it means something.
func TestPods(t *testing.T) {
	rec := PodRecord{ID: "p", Phase: PodReady, PausePID: 7, IPs: []string{"10.0.0.7"}}
	ready := NewPod(&rec, nil)
	if !ready.Ready || ready.PausePID != 7 {
		t.Errorf("a ready pod is %+v", ready)
	}
	pauseless := ready.Pauseless()
	if pauseless.Ready || pauseless.PausePID != 0 || pauseless.ID != "p" || len(pauseless.IPs) != 1 {
		t.Errorf("without its pause it is %+v", pauseless)
	}
	if !ready.Ready || ready.PausePID != 7 {
		t.Error("the snapshot before was changed")
	}
	for _, phase := range []Phase{PodStarting, PodStopped, Removing} {
		rec.Phase = phase
		if p := NewPod(&rec, nil); p.Ready || p.PausePID != 0 {
			t.Errorf("%s: %+v", phase, p)
		}
	}
}

func TestContainers(t *testing.T) {
	started, finished := time.Unix(100, 0), time.Unix(200, 0)
	exit := &Exit{Code: 137, Reason: "OOMKilled", StartedAt: started, FinishedAt: finished}
	for name, test := range map[string]struct {
		phase    Phase
		exit     *Exit
		state    runtimeapi.ContainerState
		pid      int
		started  time.Time
		finished time.Time
	}{
		"created":  {ContainerCreated, nil, runtimeapi.ContainerState_CONTAINER_CREATED, 0, time.Time{}, time.Time{}},
		"starting": {ContainerStarting, nil, runtimeapi.ContainerState_CONTAINER_CREATED, 0, time.Time{}, time.Time{}},
		"running":  {ContainerRunning, nil, runtimeapi.ContainerState_CONTAINER_RUNNING, 7, started, time.Time{}},
		"exited":   {ContainerExited, exit, runtimeapi.ContainerState_CONTAINER_EXITED, 0, started, finished},
		"removing": {Removing, exit, runtimeapi.ContainerState_CONTAINER_EXITED, 0, started, finished},
	} {
		rec := ContainerRecord{ID: "c", PodID: "p", Phase: test.phase, Exit: test.exit, Image: Image{Config: ocispec.ImageConfig{StopSignal: "SIGUSR1"}}}
		c := NewContainer(&rec, &runtimeapi.ContainerConfig{}, nil, 7, started)
		if c.State != test.state || c.PID != test.pid || !c.StartedAt.Equal(test.started) || !c.FinishedAt.Equal(test.finished) {
			t.Errorf("%s: %+v", name, c)
		}
		if test.exit != nil && (c.ExitCode != 137 || c.Reason != "OOMKilled") {
			t.Errorf("%s: exit %d, %s", name, c.ExitCode, c.Reason)
		}
		if c.StopSignal != runtimeapi.Signal_SIGNAL_SIGUSR1 {
			t.Errorf("%s: the stop signal is %v, not the image's", name, c.StopSignal)
		}
	}
}

// Each step from one snapshot to the next is told once; what changes nothing that a client sees is not.
func TestEvents(t *testing.T) {
	pod := &Pod{ID: "p", Ready: true}
	created := &Container{ID: "c", PodID: "p", State: runtimeapi.ContainerState_CONTAINER_CREATED}
	running := &Container{ID: "c", PodID: "p", State: runtimeapi.ContainerState_CONTAINER_RUNNING}
	exited := &Container{ID: "c", PodID: "p", State: runtimeapi.ContainerState_CONTAINER_EXITED}
	events := NewEvents(
		func(id string) *Pod {
			if id == pod.ID {
				return pod
			}
			return nil
		},
		func(string) []*Container { return []*Container{running} })
	reader := events.Subscribe()
	defer reader.Close()

	events.PodChanged(nil, pod)
	events.ContainerChanged(nil, created)
	events.ContainerChanged(created, created) // its limits were changed
	events.ContainerChanged(created, running)
	events.ContainerChanged(running, exited)
	events.ContainerDeleted(nil) // it was never published
	events.ContainerDeleted(exited)
	events.ContainerDeleted(&Container{ID: "d", PodID: "gone"})
	events.PodChanged(pod, pod)
	events.PodChanged(pod, pod.Pauseless())
	events.PodDeleted(nil)
	events.PodDeleted(pod)

	for i, want := range []struct {
		kind runtimeapi.ContainerEventType
		id   string
		pod  bool
	}{
		{runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, "p", true},
		{runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, "p", true},
		{runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, "c", true},
		{runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, "d", false}, // it had outlived its pod
		{runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, "p", true},
		{runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, "p", true},
	} {
		got := next(t, reader)
		if got.Type != want.kind || got.ID != want.id || (got.Pod == pod) != want.pod {
			t.Errorf("event %d is %v of %s (pod %v), want %v of %s", i, got.Type, got.ID, got.Pod, want.kind, want.id)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if more, err := reader.Next(ended); err == nil {
		t.Errorf("one event too many: %v of %s", more.Type, more.ID)
	}
}

func next(t *testing.T, reader *feed.Reader[Event]) Event {
	t.Helper()
	event, err := reader.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return event
}

func TestStatusMounts(t *testing.T) {
	mounts := []*runtimeapi.Mount{
		{ContainerPath: "/a", HostPath: "/b"},
		{ContainerPath: "/v", Image: &runtimeapi.ImageSpec{Image: "name", ImageRef: "made up"}},
	}
	got := statusMounts(&runtimeapi.ContainerConfig{Mounts: mounts}, []Volume{{Mount: 1, ImageID: "sha256:1"}})
	if got[0] != mounts[0] || got[1].Image.Image != "name" || got[1].Image.ImageRef != "sha256:1" {
		t.Errorf("got %v", got)
	}
	if mounts[1].Image.ImageRef != "made up" {
		t.Error("the config was changed")
	}
}
