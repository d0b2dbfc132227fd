package integration

import (
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

// Many clients read all events of many containers in the same order, while another client never
// reads. That client does not disturb the others. The daemon ends its stream when its queue is
// full, and frees its memory.
func TestStuckEventClientIsDisconnected(t *testing.T) {
	testutil.Long(t)
	const (
		clients = 20
		lives   = 60   // number of started containers
		kept    = 8192 // length of a client's queue in the daemon
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
	if testing.Short() { // the stuck client's queue is not full yet
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
