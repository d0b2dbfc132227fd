package server

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
	"berth/server/journal"
)

// Events is the part of the sandbox manager that GetContainerEvents uses.
type Events interface {
	Events() *state.Queue[state.Event]
}

// EventLog is the journal of events and the positions of its clients.
type EventLog struct {
	journal *journal.Journal
	cursors *journal.Cursors

	mu sync.Mutex // guards the field below
	// +checklocks:mu
	open map[*eventCursor]struct{} // of streams, also of those that the stop has ended
}

// eventCursor is the cursor of a stream. Each event that is sent ends with its mark.
type eventCursor struct {
	*journal.Cursor
	key  markKey
	sent uint64 // the last event that was passed to gRPC; read after the stream's end
}

// OpenEventLog opens the journal and the positions below dir. Errors are logged: without them
// clients miss events during a restart.
func OpenEventLog(dir string, log *slog.Logger) *EventLog {
	cursors, highest := journal.OpenCursors(filepath.Join(dir, "clients"), log)
	return &EventLog{
		journal: journal.Open(dir, highest, log),
		cursors: cursors,
		open:    map[*eventCursor]struct{}{},
	}
}

// Told returns the last events that the previous daemon has published, by the object's ID.
func (e *EventLog) Told() map[string]state.ToldEvent {
	told := map[string]state.ToldEvent{}
	for id, event := range e.journal.Told() {
		told[id] = state.ToldEvent{Type: event.ContainerEventType, PodID: event.PodSandboxStatus.GetId()}
	}
	return told
}

var errStopping = errdefs.Unavailable("container events: berth is stopping")

// record writes events to the journal until ctx ends. The next daemon publishes what is left.
func (s *runtimeService) record(ctx context.Context) {
	for queue := s.pods.Events(); ; {
		events, err := queue.Next(ctx)
		if err != nil {
			return
		}
		for _, event := range events {
			if err := s.cfg.Events.journal.Append(s.eventResponse(event)); err != nil {
				s.log.Error("publish an event; clients miss it", "error", err)
			}
		}
		s.cfg.Events.journal.ForgetTold() // the first events include all of the recovery
	}
}

// GetContainerEvents implements RuntimeService (KEP-3386). The client gets all events after the
// stream's header. If the daemon ended an earlier stream of the same process, the client gets all
// events after those of that stream. The stream ends with ResourceExhausted if events were dropped
// before the client read them, and with Unavailable if berth stops. After ResourceExhausted the
// client must list again.
func (s *runtimeService) GetContainerEvents(_ *runtimeapi.GetEventsRequest,
	stream grpc.ServerStreamingServer[runtimeapi.ContainerEventResponse]) error {
	if s.stopping.Err() != nil { // a position of its own would take the place of the ended stream's
		return errStopping
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	cursor, end := s.cfg.Events.follow(ctx)
	defer func() { end(s.stopping.Err() == nil) }()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for reader := s.cfg.Events.journal.Follow(cursor.Position()); ; {
		number, event, err := reader.Next(ctx)
		switch {
		case s.stopping.Err() != nil:
			return errStopping
		case errors.Is(err, journal.ErrBehind):
			return errdefs.New(codes.ResourceExhausted, "container events: %w", err)
		case err != nil:
			return err
		}
		if err := stream.SendMsg(encoded{mem.SliceBuffer(event), mem.SliceBuffer(cursor.marked(number))}); err != nil {
			return err
		}
		cursor.sent = number
	}
}

// follow returns the position of a new stream's client. end forgets it, or keeps it for the next
// daemon.
func (e *EventLog) follow(ctx context.Context) (cursor *eventCursor, end func(forget bool)) {
	info, ok := clientOf(ctx)
	if !ok {
		info.conn = new(markedConn)
	}
	cursor = &eventCursor{e.cursors.Take(info.process(), e.journal.Last()), newKey(), 0}
	info.conn.watch(cursor)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.open[cursor] = struct{}{}
	return cursor, func(forget bool) {
		if !forget {
			return
		}
		e.mu.Lock()
		delete(e.open, cursor)
		e.mu.Unlock()
		info.conn.unwatch(cursor)
		cursor.Remove()
	}
}

// close closes the files after all streams have ended. If all messages that were sent have reached
// the sockets, it records that.
func (e *EventLog) close(allWritten bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for cursor := range e.open {
		if allWritten {
			cursor.Set(cursor.sent)
		}
		cursor.Close()
	}
	return e.journal.Close()
}

func (s *runtimeService) eventResponse(event state.Event) *runtimeapi.ContainerEventResponse {
	resp := &runtimeapi.ContainerEventResponse{
		ContainerId:        event.ID,
		ContainerEventType: event.Type,
		CreatedAt:          event.At.UnixNano(),
	}
	if event.Pod != nil {
		resp.PodSandboxStatus = podStatus(event.Pod)
	} else { // removed while no daemon ran; kubelet needs the metadata
		resp.PodSandboxStatus = s.cfg.Events.journal.Told()[event.ID].GetPodSandboxStatus()
	}
	for _, c := range slices.Backward(event.Containers) { // newest first, as in containerStatuses
		resp.ContainersStatuses = append(resp.ContainersStatuses, s.containerStatus(c))
	}
	return resp
}
