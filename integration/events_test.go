package integration

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// events subscribes to a daemon's events and returns when it has.
func events(t *testing.T, d *daemon) runtimeapi.RuntimeService_GetContainerEventsClient {
	t.Helper()
	stream := get(rawRuntime(t, d).GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{}))(t)
	get(stream.Header())(t)
	return stream
}

// Every step of a pod and its container is told once, in order and to everybody,
// with the state that it led to.
func TestContainerEvents(t *testing.T) {
	d := startDaemon(t)
	streams := []runtimeapi.RuntimeService_GetContainerEventsClient{events(t, d), events(t, d)}
	pod := d.runPod(t)
	c := pod.run(t)
	must(t, d.cri.StopContainer(t.Context(), c.id, 0))
	must(t, d.cri.RemoveContainer(t.Context(), c.id))
	pod.remove(t)

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
		{pod.id, created, ready, "[]"},
		{pod.id, started, ready, "[]"},
		{c.id, created, ready, "[CONTAINER_CREATED]"},
		{c.id, started, ready, "[CONTAINER_RUNNING]"},
		{c.id, stopped, ready, "[CONTAINER_EXITED]"},
		{c.id, deleted, ready, "[]"},
		{pod.id, stopped, notReady, "[]"},
		{pod.id, deleted, notReady, "[]"},
	}
	for _, stream := range streams {
		var last int64
		for n, w := range want {
			event, err := stream.Recv()
			must(t, err)
			states := []runtimeapi.ContainerState{}
			for _, status := range event.ContainersStatuses {
				states = append(states, status.State)
			}
			if event.ContainerId != w.id || event.ContainerEventType != w.kind || event.PodSandboxStatus.GetId() != pod.id ||
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

// An exit that nobody asked for is told with its code; a client that goes away
// leaves nothing behind (the leak check at the end sees its goroutine).
func TestEventOfAnExit(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	gone := get(rawRuntime(t, d).GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{}))(t)
	get(gone.Header())(t)
	stream := events(t, d)
	cancel()
	c := pod.run(t, command("sh", "-c", "exit 7"))
	for {
		event, err := stream.Recv()
		must(t, err)
		if event.ContainerEventType == runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT {
			equal(t, "container", event.ContainerId, c.id)
			equal(t, "exit code", event.ContainersStatuses[0].ExitCode, 7)
			break
		}
	}
	d.stop(t) // does not wait for its clients
	_, err := stream.Recv()
	wantCode(t, err, codes.Unavailable)
	d.start(t)
}
