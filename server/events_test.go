package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/server/journal"
)

// eventsFake is the queue of a sandbox manager.
type eventsFake struct {
	once  sync.Once
	queue *state.Queue[state.Event]
}

func (f *fakePods) Events() *state.Queue[state.Event] {
	f.events.once.Do(func() { f.events.queue = state.NewQueue[state.Event]() })
	return f.events.queue
}

func (f *fakePods) publish(event state.Event) { f.Events().Put(func() state.Event { return event }) }

// subscribe returns when the server has subscribed.
func subscribe(t *testing.T, h *harness) runtimeapi.RuntimeService_GetContainerEventsClient {
	t.Helper()
	stream, err := h.runtime.GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{})
	if err == nil {
		_, err = stream.Header()
	}
	testutil.Must(t, err)
	return stream
}

func TestEventsReachAllClients(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	streams := []runtimeapi.RuntimeService_GetContainerEventsClient{subscribe(t, h), subscribe(t, h)}
	at := time.Unix(3, 4)
	pods.publish(state.Event{Type: runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, ID: "c1", At: at,
		Pod: testPod{ID: "p1", Config: podConfig("a", nil)}.snapshot(), Containers: []*state.Container{exited()}})
	for _, stream := range streams {
		event, err := stream.Recv()
		testutil.Must(t, err)
		if event.ContainerId != "c1" || event.ContainerEventType != runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT ||
			event.CreatedAt != at.UnixNano() || event.PodSandboxStatus.GetId() != "p1" ||
			len(event.ContainersStatuses) != 1 || event.ContainersStatuses[0].ExitCode != exited().Exit.Code {
			t.Errorf("event: %v", event)
		}
	}
}

// publishLarge publishes n events, each larger than HTTP/2's windows, so that Send blocks for a
// client that does not read. The journal keeps a few.
func publishLarge(pods *fakePods, n int) {
	large := exited()
	large.Exit.Message = strings.Repeat("x", 1<<20)
	for n := range n {
		pods.publish(state.Event{ID: fmt.Sprint(n), Containers: []*state.Container{large}})
	}
}

// A client that does not read does not delay the server's stop.
func TestStopDoesNotWaitForSlowClient(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	h.server.grace = time.Hour // the grace period must not end the stream
	subscribe(t, h)
	publishLarge(pods, 3)
	testutil.Eventually(t, "a send waits for the client", func() bool {
		stacks := make([]byte, 1<<20)
		return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte(".(*writeQuota).get"))
	})
	testutil.Must(t, h.stop())
	if !strings.Contains(h.log.String(), "cut off") {
		t.Error("the stop coincided with no send")
	}
}

// A client that does not read gets an error, since it has missed events.
func TestSlowClientGetsError(t *testing.T) {
	pods, cfg := &fakePods{}, withEvents(t, testConfig)
	h := start(t, cfg, pods, &fakeImages{})
	slow, before := subscribe(t, h), cfg.Events.journal.Last()
	publishLarge(pods, 20)
	testutil.Eventually(t, "all events are in the journal", func() bool { return cfg.Events.journal.Last() == before+20 })
	for n := 0; ; n++ {
		event, err := slow.Recv()
		if err != nil {
			if status.Code(err) != codes.ResourceExhausted {
				t.Errorf("after %d events: %v", n, err)
			}
			return
		}
		if event.ContainerId != fmt.Sprint(n) {
			t.Errorf("event %d is %s: a gap", n, event.ContainerId)
		}
	}
}

// The same process continues at the next server where its stream ended.
func TestClientContinuesAtNextServer(t *testing.T) {
	dir := t.TempDir()
	serve := func(recovered ...state.Event) (*fakePods, *harness) {
		pods, cfg := &fakePods{}, testConfig
		for _, event := range recovered {
			pods.publish(event)
		}
		cfg.Events = OpenEventLog(dir, discardLog)
		return pods, start(t, cfg, pods, &fakeImages{})
	}
	wantNext := func(stream runtimeapi.RuntimeService_GetContainerEventsClient, id string) {
		t.Helper()
		event, err := stream.Recv()
		testutil.Must(t, err)
		if event.ContainerId != id || event.PodSandboxStatus.GetId() != "p1" {
			t.Errorf("got %v, want an event of %s", event, id)
		}
	}
	pod := testPod{ID: "p1", Config: podConfig("a", nil)}.snapshot()
	pods, h := serve()
	stream := subscribe(t, h)
	pods.publish(state.Event{ID: "c1", Pod: pod})
	wantNext(stream, "c1")
	testutil.Must(t, h.stop())
	const deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	// The pod of c1 was removed, too.
	_, h = serve(state.Event{ID: "c2", Pod: pod}, state.Event{ID: "c1", Type: deleted})
	stream = subscribe(t, h)
	wantNext(stream, "c2")
	wantNext(stream, "c1")
	testutil.Must(t, h.stop())
	pods, h = serve()
	stream = subscribe(t, h)
	pods.publish(state.Event{ID: "c3", Pod: pod})
	wantNext(stream, "c3")
}

// A position moves when the end of its event has reached the socket, however writes divide it.
func TestMarkedConn(t *testing.T) {
	t.Parallel()
	process, err := journal.ProcessOf(os.Getpid())
	testutil.Must(t, err)
	cursors, _ := journal.OpenCursors(t.TempDir(), discardLog)
	newCursor := func() *eventCursor {
		cursor := &eventCursor{cursors.Take(process, 0), newKey(), 0}
		t.Cleanup(cursor.Close)
		return cursor
	}
	size := markSize
	for cut := range size + 1 {
		mine, other := newCursor(), newCursor()
		conn := &markedConn{Conn: writesNowhere{}}
		conn.watch(mine)
		conn.watch(other)
		write := func(b []byte) {
			if n, err := conn.Write(b); n != len(b) || err != nil {
				t.Fatal(n, err)
			}
		}
		message := append([]byte("event"), mine.marked(7)...)
		write(message[:5+cut])
		if cut < size && mine.Position() != 0 {
			t.Errorf("%d of %d bytes of the mark were written: position %d", cut, size, mine.Position())
		}
		for _, b := range message[5+cut:] { // single bytes
			write([]byte{b})
		}
		write(slices.Concat(mine.marked(8), markStart, other.marked(5), newCursor().marked(6), mine.marked(9), mine.marked(10)[:size-1]))
		if mine.Position() != 9 || other.Position() != 5 {
			t.Errorf("positions %d and %d, want 9 and 5", mine.Position(), other.Position())
		}
		conn.unwatch(mine)
		write(mine.marked(11))
		if mine.Position() != 9 {
			t.Errorf("position %d after the end of the stream", mine.Position())
		}
	}
}

// BenchmarkMarkedConn is the search in 32 KB with events of 20 of a connection's streams.
func BenchmarkMarkedConn(b *testing.B) {
	for _, streams := range []int{20, 1000} {
		b.Run(fmt.Sprint(streams), func(b *testing.B) {
			cursors, _ := journal.OpenCursors(b.TempDir(), discardLog)
			conn, message := &markedConn{Conn: writesNowhere{}}, []byte(nil)
			for n := range streams {
				cursor := &eventCursor{cursors.Take(journal.Process{}, 0), newKey(), 0}
				defer cursor.Close()
				conn.watch(cursor)
				if n < 20 {
					message = append(append(message, make([]byte, 1600)...), cursor.marked(1)...)
				}
			}
			for b.Loop() {
				_, _ = conn.Write(message)
			}
		})
	}
}

type writesNowhere struct{ net.Conn }

func (writesNowhere) Write(b []byte) (int, error) { return len(b), nil }

func TestEventStreamsEndWithServer(t *testing.T) {
	h := start(t, testConfig, &fakePods{}, &fakeImages{})
	h.server.grace = time.Hour // the grace period must not end the streams
	stream := subscribe(t, h)
	testutil.Must(t, h.stop())
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestListsInBatchesAnswerAsLists(t *testing.T) {
	pods := &fakePods{}
	images := &fakeImages{images: []*image.Image{{ID: idA, RepoTags: []string{"x"}}, {ID: idB, RepoTags: []string{"y"}}}}
	h := start(t, testConfig, pods, images)
	ctx := context.Background()
	const count = 300
	for n := range count { // the labels exceed one message
		pod, err := pods.RunPodSandbox(ctx, podConfig(fmt.Sprint(n), map[string]string{"l": strings.Repeat("x", 16<<10)}), "")
		testutil.Must(t, err)
		if _, err := pods.CreateContainer(ctx, pod, exited().Config, nil); err != nil {
			t.Fatal(err)
		}
	}
	podStream, err := h.runtime.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{})
	testutil.Must(t, err)
	messages := 0
	var ids []string
	for {
		m, err := podStream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || len(m.PodSandboxes) == 0 {
			t.Fatalf("message %d: %d items, %v", messages, len(m.GetPodSandboxes()), err)
		}
		messages++
		for _, p := range m.PodSandboxes {
			ids = append(ids, p.Id)
		}
	}
	if messages < 2 || len(ids) != count {
		t.Errorf("%d pods in %d messages", len(ids), messages)
	}
	for n, id := range ids {
		if id != fmt.Sprintf("pod%d", n) {
			t.Fatalf("pod %d is %s", n, id)
		}
	}
	containerStream, err := h.runtime.StreamContainers(ctx, &runtimeapi.StreamContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: "pod7"}})
	testutil.Must(t, err)
	one, err := containerStream.Recv()
	if err != nil || len(one.Containers) != 1 || one.Containers[0].PodSandboxId != "pod7" {
		t.Errorf("filtered containers: %v, %v", one, err)
	}
	if _, err := containerStream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("end of the containers: %v", err)
	}
	imageStream, err := h.images.StreamImages(ctx, &runtimeapi.StreamImagesRequest{})
	testutil.Must(t, err)
	if all, err := imageStream.Recv(); err != nil || len(all.Images) != 2 {
		t.Errorf("images: %v, %v", all, err)
	}
	if _, err := imageStream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("end of the images: %v", err)
	}
	none, err := h.runtime.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{Filter: &runtimeapi.PodSandboxFilter{Id: "nobody"}})
	testutil.Must(t, err)
	if m, err := none.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("an empty list: %v, %v", m, err)
	}
}
