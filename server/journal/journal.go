// Package journal keeps the events of pods and containers for clients that are away while the
// daemon restarts.
//
// # Contract
//
// A [Journal] is one file with numbered events. Each event is in the file before a client gets it,
// so a client that has read event n continues with n+1, also at the next daemon. The file is
// limited: old events are dropped, but never the last one of an object that exists. So the file
// also tells which events a later daemon must still publish ([Journal.Told]). A [Cursor] is a
// client's position, in a file of its own.
//
// Nothing is synced, because the directory is emptied at a reboot. Damage or a full filesystem ends
// no daemon. It loses positions at most, and a client that misses events gets ErrBehind.
package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/failpoint"
)

// ErrBehind means that the client misses events, because the journal does not have them any more.
var ErrBehind = errors.New("the client is too far behind: events were dropped")

// usualLimit is the size in bytes at which old events are dropped. The newer half stays. An event
// of a pod with one container has one to two KB.
const usualLimit = 4 << 20

// Journal is the file of events. One goroutine at a time may call Append. Any number may follow.
type Journal struct {
	path  string
	told  Told
	log   *slog.Logger
	limit int64 // see usualLimit
	full  int64 // the size at which old events are dropped next

	view atomic.Pointer[view] // never nil
}

// view is an immutable description of the file.
type view struct {
	file  *os.File
	lost  bool // the file is in memory, because it could not be written
	size  int64
	first uint64        // the file has all events from here on
	last  uint64        // the newest event
	grown chan struct{} // closed when another view has replaced this one
}

// Told is the last event of each existing object, by its ID, without statuses of containers.
type Told map[string]*runtimeapi.ContainerEventResponse

// Open opens the journal in an existing directory, or starts a new one. It keeps everything before
// the first damaged event. highest is the highest position of a client. If the journal does not
// have that event any more, these clients get ErrBehind. If the directory cannot be used, the
// journal is a file in memory.
func Open(dir string, highest uint64, log *slog.Logger) *Journal {
	return open(dir, highest, usualLimit, log)
}

func open(dir string, highest uint64, limit int64, log *slog.Logger) *Journal {
	j := &Journal{path: filepath.Join(dir, "journal"), limit: limit, log: log}
	data, err := os.ReadFile(j.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("read the events of the previous daemon; clients may miss events", "error", err)
	}
	found := parse(data)
	if found.size < int64(len(data)) {
		log.Warn("the journal of events is incomplete; missing events are published again", "path", j.path)
	}
	first := found.first
	if found.size == 0 || found.last() < highest {
		first = highest + 2 // no client has the event before it
	}
	j.told, _ = lastOfEach(found.entries)
	j.view.Store(&view{first: first, last: max(found.last(), first-1), grown: make(chan struct{})})
	j.rewrite(found.entries)
	return j
}

// Told returns the last events that the previous daemon has published, until ForgetTold.
func (j *Journal) Told() Told { return j.told }

// ForgetTold frees what Told returns. No other call may run meanwhile.
func (j *Journal) ForgetTold() { j.told = nil }

// Last returns the number of the newest event.
func (j *Journal) Last() uint64 { return j.view.Load().last }

// Append adds an event and wakes its readers. If the file cannot be written, it continues in
// memory, until an event finds that it can be written again.
func (j *Journal) Append(event *runtimeapi.ContainerEventResponse) error {
	v := j.view.Load()
	next, err := newEntry(v.last+1, event)
	if err != nil {
		return err
	}
	if j.write(v, next) == nil && v.size+int64(len(next)) <= j.full && !v.lost {
		return nil
	}
	v = j.view.Load()
	data, err := io.ReadAll(io.NewSectionReader(v.file, 0, v.size))
	if err != nil {
		j.log.Warn("read the journal of events; clients must list again", "error", err)
	}
	entries := parse(data).entries
	if v.last < next.number() { // it could not be written
		entries = append(entries, next)
	}
	j.rewrite(entries)
	return nil
}

// write appends an entry to the file and publishes the new view.
func (j *Journal) write(v *view, e entry) error {
	failpoint.Reach("events.append")
	_, err := v.file.WriteAt(e, v.size)
	failpoint.Reach("events.appended")
	if err != nil {
		return err
	}
	j.replace(&view{file: v.file, lost: v.lost, size: v.size + int64(len(e)), first: v.first, last: e.number()})
	return nil
}

func (j *Journal) replace(v *view) {
	v.grown = make(chan struct{})
	close(j.view.Swap(v).grown)
}

// rewrite replaces the file by one with the newest of these events, up to half of the limit, and
// with the last event of each object.
func (j *Journal) rewrite(entries []entry) {
	before := j.view.Load()
	v := &view{first: before.first, last: before.last}
	kept, size := len(entries), int64(0)
	for kept > 0 && entries[kept-1].number() >= before.first {
		if size += int64(len(entries[kept-1])); size > j.limit/2 && kept < len(entries) {
			v.first = entries[kept-1].number() + 1
			break
		}
		kept--
	}
	if len(entries) > 0 {
		v.last = max(v.last, entries[len(entries)-1].number())
	}
	content := header(v.first)
	_, last := lastOfEach(entries[:kept])
	for _, e := range last {
		content = append(content, pack(e.number(), e.short(), nil)...)
	}
	for _, e := range entries[kept:] {
		content = append(content, e...)
	}
	j.full = max(j.limit, int64(len(content))+j.limit/2)
	var err error
	if v.file, err = create(j.path, content); err != nil {
		v.lost = true
		if !before.lost {
			j.log.Warn("write the journal of events; clients miss the events during the next restart", "error", err)
		}
		if v.file, err = inMemory(content); err != nil {
			j.log.Error("keep events in memory", "error", err)
			return
		}
	}
	v.size = int64(len(content))
	j.replace(v)
	if before.file != nil {
		_ = before.file.Close() // readers continue with the new file
	}
}

// create writes a file and places it at path. After an error there is none, because an old file
// would be wrong for the next daemon, and a draft would fill the filesystem.
func create(path string, content []byte) (*os.File, error) {
	draft := path + ".tmp"
	failpoint.Reach("events.create")
	file, err := os.OpenFile(draft, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	failpoint.Reach("events.created")
	if err == nil {
		_, err = file.Write(content)
	}
	if err == nil {
		failpoint.Reach("events.place")
		err = os.Rename(draft, path)
		failpoint.Reach("events.placed")
	}
	if err != nil {
		_ = file.Close() // nil if it was not created
		return nil, errors.Join(err, remove(draft), remove(path))
	}
	return file, nil
}

// remove removes a file that may be missing.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func inMemory(content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("berth-events", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a file in memory: %w", err)
	}
	file := os.NewFile(uintptr(fd), "events")
	if _, err := file.Write(content); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Close closes the file.
func (j *Journal) Close() error { return j.view.Load().file.Close() }

// lastOfEach returns the last event of each object that was not deleted, in order.
func lastOfEach(entries []entry) (told Told, last []entry) {
	told, of := Told{}, map[string]entry{}
	for _, e := range entries {
		event := &runtimeapi.ContainerEventResponse{}
		if proto.Unmarshal(e.short(), event) != nil {
			continue // the checksum is right, so a later version wrote it
		}
		told[event.ContainerId], of[event.ContainerId] = event, e
		if event.ContainerEventType == runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT {
			delete(told, event.ContainerId)
			delete(of, event.ContainerId)
		}
	}
	return told, slices.SortedFunc(maps.Values(of), func(a, b entry) int { return cmp.Compare(a.number(), b.number()) })
}

// Reader reads the events after a position. One goroutine at a time may use it.
type Reader struct {
	journal *Journal
	after   uint64
	file    *os.File // that offset belongs to
	offset  int64
}

// Follow returns a reader of the events after number n. It has nothing to close.
func (j *Journal) Follow(n uint64) *Reader { return &Reader{journal: j, after: n} }

// Next waits for the next event, and returns its number and encoding. The error is ErrBehind if
// events are missing, or ctx's.
func (r *Reader) Next(ctx context.Context) (number uint64, event []byte, err error) {
	for {
		v := r.journal.view.Load()
		switch e, err := r.read(v); {
		case err == nil:
			r.after = e.number()
			return e.number(), e.event(), nil
		case r.journal.view.Load() != v:
			continue
		case !errors.Is(err, io.EOF):
			return 0, nil, err
		}
		select {
		case <-v.grown:
		case <-ctx.Done():
			return 0, nil, fmt.Errorf("wait for the next event: %w", ctx.Err())
		}
	}
}

// read returns the next event of the view. The error is io.EOF if there is none yet.
func (r *Reader) read(v *view) (entry, error) {
	if r.after >= v.last {
		return nil, io.EOF
	}
	if r.after+1 < v.first {
		return nil, ErrBehind
	}
	if r.file != v.file {
		r.file, r.offset = v.file, headerSize
	}
	for r.offset < v.size {
		e, err := readEntry(io.NewSectionReader(v.file, r.offset, v.size-r.offset), r.after)
		if err != nil {
			return nil, fmt.Errorf("read the journal of events: %w", err)
		}
		r.offset += e.size()
		if e.number() > r.after {
			return e, nil
		}
	}
	return nil, ErrBehind // it was not written
}
