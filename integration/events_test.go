package integration

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// events subscribes to a daemon's events. It returns once the subscription is active.
func events(t *testing.T, d *harness.Daemon) runtimeapi.RuntimeService_GetContainerEventsClient {
	t.Helper()
	stream := harness.Get(harness.RawRuntime(t, d).GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{}))(t)
	harness.Get(stream.Header())(t)
	return stream
}

// Every step of a pod and its container causes one event with the resulting state. Every client
// gets the events in order.
func TestContainerEvents(t *testing.T) {
	d := harness.StartDaemon(t)
	streams := []runtimeapi.RuntimeService_GetContainerEventsClient{events(t, d), events(t, d)}
	pod := d.RunPod(t)
	c := pod.Run(t)
	harness.Must(t, d.Cri.StopContainer(t.Context(), c.Id, 0))
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	pod.Remove(t)

	const (
		created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT
		started = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT
		stopped = runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT
		deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	)
	const ready, notReady = runtimeapi.PodSandboxState_SANDBOX_READY, runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	want := []struct {
		id         string
		kind       runtimeapi.ContainerEventType
		pod        runtimeapi.PodSandboxState
		containers string // the states of the pod's containers
	}{
		{pod.Id, created, ready, "[]"},
		{pod.Id, started, ready, "[]"},
		{c.Id, created, ready, "[CONTAINER_CREATED]"},
		{c.Id, started, ready, "[CONTAINER_RUNNING]"},
		{c.Id, stopped, ready, "[CONTAINER_EXITED]"},
		{c.Id, deleted, ready, "[]"},
		{pod.Id, stopped, notReady, "[]"},
		{pod.Id, deleted, notReady, "[]"},
	}
	for _, stream := range streams {
		var last int64
		for n, w := range want {
			event := harness.Get(stream.Recv())(t)
			states := []runtimeapi.ContainerState{}
			for _, status := range event.ContainersStatuses {
				states = append(states, status.State)
			}
			if event.ContainerId != w.id || event.ContainerEventType != w.kind || event.PodSandboxStatus.GetId() != pod.Id ||
				event.PodSandboxStatus.GetState() != w.pod || fmt.Sprint(states) != w.containers {
				t.Errorf("event %d is %v, want %+v", n, event, w)
			}
			if event.CreatedAt < last {
				t.Errorf("event %d is older than the one before", n)
			}
			last = event.CreatedAt
		}
	}
}

// The exit of a container causes an event with its code. A client that disconnects leaves nothing
// behind, because the leak check counts goroutines.
func TestExitEvent(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	gone := harness.Get(harness.RawRuntime(t, d).GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{}))(t)
	harness.Get(gone.Header())(t)
	stream := events(t, d)
	cancel()
	c := pod.Run(t, harness.Command("sh", "-c", "exit 7"))
	for {
		event := harness.Get(stream.Recv())(t)
		if event.ContainerEventType == runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT {
			harness.Equal(t, "container", event.ContainerId, c.Id)
			harness.Equal(t, "exit code", event.ContainersStatuses[0].ExitCode, 7)
			break
		}
	}
	d.Stop(t) // does not wait for its clients
	_, err := stream.Recv()
	harness.WantCode(t, err, codes.Unavailable)
	d.Start(t)
}
