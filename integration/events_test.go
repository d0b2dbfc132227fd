package integration

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
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

// Many clients read all events of many containers in the same order, while another client never
// reads. That client does not disturb the others. The daemon ends its stream when the journal
// has dropped events that it has not read.
func TestStuckEventClientIsDisconnected(t *testing.T) {
	testutil.Long(t)
	const (
		clients = 20
		lives   = 60   // number of started containers
		kept    = 4096 // more events than the daemon's journal has
	)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	d.Pull(t, harness.BaseImage)
	stuck := events(t, d)
	streams := make([]runtimeapi.RuntimeService_GetContainerEventsClient, clients-1)
	for i := range streams {
		streams[i] = events(t, d)
	}
	first := sameEvents(t, streams, 4*lives, func() { runContainers(t, d, pod, lives, true) })
	harness.Equal(t, "number of stopped containers", strings.Count(first, "STOPPED"), lives)
	harness.Equal(t, "number of removed containers", strings.Count(first, "DELETED"), lives)
	if testing.Short() { // the journal has all events
		harness.Equal(t, "events that the stuck client reads later", harness.Get(readEvents(stuck, 4*lives))(t), first)
		return
	}
	const more = kept/2 + 500 // two events each; some are still in flight to the client
	sameEvents(t, streams, 2*more, func() { runContainers(t, d, pod, more, false) })
	n := 0
	var err error
	for ; err == nil; n++ {
		_, err = stuck.Recv()
	}
	harness.WantCode(t, err, codes.ResourceExhausted)
	t.Logf("the stuck client got %d of %d events", n-1, 4*lives+2*more)
	peak := harness.Get(strconv.Atoi(strings.Fields(machine.StatusField(t, d.Cmd.Process.Pid, "VmHWM"))[0]))(t)
	if peak > 256<<10 {
		t.Errorf("the daemon's peak memory is %d KiB, want at most %d", peak, 256<<10)
	}
}

// runContainer creates and removes a container. If start is set, it also starts and stops the
// container.
func runContainer(t *testing.T, d *harness.Daemon, pod *harness.Pod, start bool) error {
	config := pod.ContainerConfig(harness.Command("true"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	id, err := d.Cri.CreateContainer(t.Context(), pod.Id, config, pod.Config)
	if err == nil && start {
		if err = d.Cri.StartContainer(t.Context(), id); err == nil {
			err = d.Cri.StopContainer(t.Context(), id, 10)
		}
	}
	if err != nil {
		return err
	}
	return d.Cri.RemoveContainer(t.Context(), id)
}

// runContainers calls runContainer n times, several times in parallel.
func runContainers(t *testing.T, d *harness.Daemon, pod *harness.Pod, n int, start bool) {
	t.Helper()
	const workers = 6
	errs := make(chan error, workers)
	for w := range workers {
		go func() {
			var err error
			for i := w; i < n && err == nil; i += workers {
				err = runContainer(t, d, pod, start)
			}
			errs <- err
		}()
	}
	for range workers {
		harness.Must(t, <-errs)
	}
}

// readEvents reads n events from a stream and checks the order of each container's events.
func readEvents(stream runtimeapi.RuntimeService_GetContainerEventsClient, n int) (string, error) {
	var all strings.Builder
	last := map[string]runtimeapi.ContainerEventType{}
	for range n {
		event, err := stream.Recv()
		if err != nil {
			return "", err
		}
		if before, known := last[event.ContainerId]; known && event.ContainerEventType <= before {
			return "", fmt.Errorf("container %s: %s after %s", event.ContainerId, event.ContainerEventType, before)
		}
		last[event.ContainerId] = event.ContainerEventType
		fmt.Fprintln(&all, event.ContainerId, event.ContainerEventType)
	}
	return all.String(), nil
}

// sameEvents calls a function that causes n events and reads them from all streams. It checks that
// all streams have the same events, and returns them.
func sameEvents(t *testing.T, streams []runtimeapi.RuntimeService_GetContainerEventsClient, n int, run func()) string {
	t.Helper()
	all, errs := make([]string, len(streams)), make([]error, len(streams))
	var reading sync.WaitGroup
	for i, stream := range streams {
		reading.Go(func() { all[i], errs[i] = readEvents(stream, n) })
	}
	run()
	reading.Wait()
	harness.Must(t, errors.Join(errs...))
	for _, one := range all {
		if one != all[0] {
			t.Fatalf("one client read\n%s\nanother\n%s", all[0], one)
		}
	}
	return all[0]
}
