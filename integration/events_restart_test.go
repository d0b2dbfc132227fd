package integration

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/internal/testutil"
)

// watcher is a client of events that connects again at once.
type watcher struct {
	subscribed chan struct{} // closed when the first stream is active

	mu sync.Mutex
	// +checklocks:mu
	got map[string][]*runtimeapi.ContainerEventResponse // events by type and object
	// +checklocks:mu
	streams int
}

// watch reads events until ctx ends. It returns the first unexpected error.
func (w *watcher) watch(ctx context.Context, client runtimeapi.RuntimeServiceClient) error {
	for {
		stream, err := client.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{}, grpc.WaitForReady(true))
		if err == nil {
			_, err = stream.Header()
		}
		if err == nil {
			w.mu.Lock()
			if w.streams++; w.streams == 1 {
				close(w.subscribed)
			}
			w.mu.Unlock()
		}
		for err == nil {
			var event *runtimeapi.ContainerEventResponse
			if event, err = stream.Recv(); err == nil {
				w.add(event)
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if code := harness.CodeOf(err); code != codes.Unavailable {
			return fmt.Errorf("the stream ended: %w", err)
		}
	}
}

func (w *watcher) add(event *runtimeapi.ContainerEventResponse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := event.ContainerEventType.String() + " " + event.ContainerId
	w.got[key] = append(w.got[key], event)
}

// has reports whether an event of the container arrived.
func (w *watcher) has(kind runtimeapi.ContainerEventType, id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.got[kind.String()+" "+id]) > 0
}

// doubled returns the number of repeated events. Each event must have the pod's metadata, and a
// repeated one must have the time of the first.
func (w *watcher) doubled(t *testing.T) (n int) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, events := range w.got {
		n += len(events) - 1
		for _, event := range events {
			if event.PodSandboxStatus.GetMetadata().GetUid() == "" {
				t.Errorf("%s has no metadata of its pod", key)
			}
			if event.CreatedAt != events[0].CreatedAt {
				t.Errorf("%s was published at %d and at %d", key, events[0].CreatedAt, event.CreatedAt)
			}
		}
	}
	return n
}

// A client that connects again gets all events once, however often the daemon is replaced. If the
// daemon is killed, an event may be repeated, but is never missed.
func TestEventsOutliveRestarts(t *testing.T) {
	exits, restarts := 100, 3
	if testutil.AllTests() {
		exits, restarts = 1000, 20
	}
	for name, signal := range map[string]syscall.Signal{"upgraded": syscall.SIGTERM, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.WithHeldSocket)
			pod := d.RunPod(t, harness.HostNetwork)
			d.EnsureImage(t, harness.BaseImage)
			w := &watcher{subscribed: make(chan struct{}), got: map[string][]*runtimeapi.ContainerEventResponse{}}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			watched := make(chan error, 1)
			client := harness.RawRuntime(t, d)
			go func() { watched <- w.watch(ctx, client) }()
			<-w.subscribed
			load := runExits(t, client, pod, exits)
			for n := range restarts {
				load.await(t, n*exits/restarts)
				d.Disconnect(t)
				d.Signal(t, signal)
				d.Start(t)
			}
			ids := load.wait(t)
			harness.Eventually(t, "all events arrive", func() error { return missing(w, ids) })
			cancel()
			harness.Must(t, <-watched)
			doubled := w.doubled(t)
			t.Logf("%d exits, %d restarts, %d streams: no event was missed, %d were doubled", exits, restarts, w.streams, doubled)
			if signal != syscall.SIGKILL {
				harness.Equal(t, "number of doubled events", doubled, 0)
			}
			pod.Remove(t)
		})
	}
}

// missing returns an error if an event of a container has not arrived.
func missing(w *watcher, ids []string) error {
	for _, id := range ids {
		for kind := runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT; kind <= runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT; kind++ {
			if !w.has(kind, id) {
				return fmt.Errorf("%s of %s", kind, id)
			}
		}
	}
	return nil
}

// exitLoad runs containers that exit at once, and removes them.
type exitLoad struct {
	started chan string // IDs of started containers
	failed  chan error  // one for each worker
	all     []string    // used by await and wait
}

const exitWorkers = 4

func runExits(t *testing.T, client runtimeapi.RuntimeServiceClient, pod *harness.Pod, n int) *exitLoad {
	l := &exitLoad{started: make(chan string, n), failed: make(chan error, exitWorkers)}
	configs := make(chan *runtimeapi.ContainerConfig, n)
	for range n {
		configs <- pod.ContainerConfig(harness.Command("true"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	}
	close(configs)
	for range exitWorkers {
		go func() {
			var err error
			for config := range configs {
				if err = l.run(t.Context(), client, pod, config); err != nil {
					break
				}
			}
			l.failed <- err
		}()
	}
	return l
}

// run starts one container and removes it. It repeats calls that a restart has cut.
func (l *exitLoad) run(ctx context.Context, client runtimeapi.RuntimeServiceClient, pod *harness.Pod, config *runtimeapi.ContainerConfig) error {
	var id string
	for _, call := range []func() error{
		func() error {
			created, err := client.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: pod.Id, Config: config, SandboxConfig: pod.Config}, grpc.WaitForReady(true))
			id = created.GetContainerId()
			return err
		},
		func() error {
			_, err := client.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id}, grpc.WaitForReady(true))
			// The cut call has started it, and it has exited.
			if harness.CodeOf(err) == codes.FailedPrecondition {
				return nil
			}
			return err
		},
		func() error { l.started <- id; return nil },
		func() error {
			_, err := client.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: 60}, grpc.WaitForReady(true))
			return err
		},
		func() error {
			_, err := client.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id}, grpc.WaitForReady(true))
			return err
		},
	} {
		if err := retryCut(call); err != nil {
			return err
		}
	}
	return nil
}

// retryCut repeats a call that ended with its daemon.
func retryCut(call func() error) error {
	for {
		if err := call(); harness.CodeOf(err) != codes.Unavailable {
			return err
		}
	}
}

// await waits until n containers were started.
func (l *exitLoad) await(t *testing.T, n int) {
	t.Helper()
	for len(l.all) < n {
		select {
		case id := <-l.started:
			l.all = append(l.all, id)
		case err := <-l.failed: // a worker has ended
			harness.Must(t, err)
			l.failed <- nil
		}
	}
}

// wait waits for all containers and returns their IDs.
func (l *exitLoad) wait(t *testing.T) []string {
	t.Helper()
	for range exitWorkers {
		harness.Must(t, <-l.failed)
	}
	close(l.started)
	for id := range l.started {
		l.all = append(l.all, id)
	}
	return l.all
}
