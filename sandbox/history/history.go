// Package history keeps the traces of the last pod starts on disk.
//
// # Contract
//
// A Recording collects the traces of one pod's start. They are about the pod, the newest attempt of
// each container, and the image pulls for which the containers waited. Adding a trace takes one
// lock and no disk. A goroutine writes changed recordings some seconds later, one file per pod. It
// keeps the newest Kept files, and up to trimEvery more for a while.
//
// A file is replaced by rename and has a checksum. The file is not synced. After a power cut,
// starts of the last seconds may be missing, and damaged files are deleted. Nothing depends on the
// files, so an error is logged and delays no pod.
package history

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/checkpoint/record"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

const (
	// Kept is the number of pod starts on disk.
	Kept = 200
	// delay is the time between a change and its write. Most starts are complete by then.
	delay = 2 * time.Second
	// trimEvery is the number of writes between two deletions of old files.
	trimEvery = 50
	// maxFile bounds a file, in bytes. A start with three containers has about 10 KiB.
	maxFile = 256 << 10

	kind    = "start"
	version = 1
	suffix  = ".record"
)

// Pod identifies a pod.
type Pod struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	Attempt   uint32 `json:"attempt"`
}

// Start is a pod's start. Operations are sorted by their beginnings.
type Start struct {
	Pod
	Operations []trace.Operation `json:"operations"`
}

// History writes and reads starts. Use New, and Run in a goroutine. The lock guards changed and
// waiting.
type History struct {
	dir     string
	log     *slog.Logger
	wake    chan struct{}      // capacity 1: changed is not empty
	flushes chan chan struct{} // requests to write at once; closed when written
	delay   time.Duration

	// Only the goroutine of Run uses these.
	writes  int  // since the last deletion of old files
	checked bool // damaged files are deleted

	mu sync.Mutex
	// +checklocks:mu
	changed map[string]*Recording // by pod ID: recordings that have changed since the last write
	// +checklocks:mu
	waiting []waitingPull // for pods that do not exist yet, oldest first
}

// New returns the history in the existing directory dir.
func New(dir string, log *slog.Logger) *History {
	return &History{
		dir:     dir,
		log:     log,
		wake:    make(chan struct{}, 1),
		flushes: make(chan chan struct{}),
		delay:   delay,
		writes:  trimEvery,
		changed: map[string]*Recording{},
	}
}

// Run writes changed starts until ctx ends, and then once more.
func (h *History) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			h.write(true)
			return
		case written := <-h.flushes:
			h.write(true)
			close(written)
		case <-h.wake:
			if written := h.rest(ctx); written != nil {
				h.write(true)
				close(written)
			} else {
				h.write(ctx.Err() != nil)
			}
		}
	}
}

// rest waits for the delay, for a request to flush, or for the end of ctx. It returns the request.
func (h *History) rest(ctx context.Context) (flush chan struct{}) {
	timer := time.NewTimer(h.delay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case flush = <-h.flushes:
	}
	return flush
}

// flush waits until all changes so far are written.
func (h *History) flush(ctx context.Context) error {
	written := make(chan struct{})
	select {
	case h.flushes <- written:
	case <-ctx.Done():
		return fmt.Errorf("write the last starts: %w", ctx.Err())
	}
	select {
	case <-written:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write the last starts: %w", ctx.Err())
	}
}

// note marks a recording as changed. It does not block.
func (h *History) note(r *Recording) {
	h.mu.Lock()
	h.changed[r.pod.ID] = r
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// write writes the changed recordings, and deletes old files. Unless all is set, recordings with a
// running operation wait for the next write.
func (h *History) write(all bool) {
	h.mu.Lock()
	changed := h.changed
	h.changed = map[string]*Recording{}
	h.mu.Unlock()
	for _, r := range changed {
		start, running := r.start()
		if running {
			h.note(r) // so that it is written when it is complete
			if !all {
				continue
			}
		}
		if err := h.save(start, r.adopted); err != nil {
			h.log.Warn("keep the trace of a pod's start", "pod", start.ID, "error", err)
		}
		h.writes++
	}
	if h.writes >= trimEvery {
		h.writes = 0
		h.tidy()
	}
}

// tidy deletes old files. The first time it also deletes damaged files.
func (h *History) tidy() {
	failed := h.trim()
	if !h.checked {
		h.checked = true
		failed = errors.Join(failed, removeIfExists(filepath.Join(h.dir, tmpName)), h.deleteDamaged())
	}
	if failed != nil && !errdefs.IsUnwritable(failed) {
		h.log.Warn("delete traces of old starts", "error", failed)
	}
}

// save writes a start. If an earlier daemon has started a pod, the pod's file has operations that
// this daemon does not have. They are kept unless newer operations replace them.
func (h *History) save(s Start, adopted bool) error {
	if adopted {
		earlier, err := h.load(s.ID)
		if err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		s.Operations = merge(earlier.Operations, s.Operations)
	}
	data, err := encode(s)
	if err != nil {
		return err
	}
	tmp := filepath.Join(h.dir, tmpName)
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return errors.Join(err, removeIfExists(tmp))
	}
	return os.Rename(tmp, h.path(s.ID))
}

// tmpName is the temporary file. Only one goroutine writes.
const tmpName = ".tmp"

// encode returns the content of a start's file. It omits the parts of operations that do not fit.
// It doubles the number of shortened operations each time, because encoding takes long.
func encode(s Start) ([]byte, error) {
	for n := 1; ; n *= 2 {
		data, err := record.Encode(kind, version, s)
		if err != nil || len(data) <= maxFile {
			return data, err
		}
		if !shorten(&s, n) {
			return nil, fmt.Errorf("trace has %d bytes, more than %d", len(data), maxFile)
		}
	}
}

// shorten removes the parts of the n operations with the most parts. It changes a copy.
func shorten(s *Start, n int) bool {
	s.Operations = slices.Clone(s.Operations)
	longest := make([]*trace.Operation, len(s.Operations))
	for i := range s.Operations {
		longest[i] = &s.Operations[i]
	}
	slices.SortStableFunc(longest, func(a, b *trace.Operation) int { return len(b.Spans) - len(a.Spans) })
	shortened := false
	for _, o := range longest[:min(n, len(longest))] {
		if len(o.Spans) > 1 {
			o.Missing += len(o.Spans) - 1
			o.Spans = o.Spans[:1]
			shortened = true
		}
	}
	return shortened
}

func (h *History) path(podID string) string { return filepath.Join(h.dir, podID+suffix) }

// load reads a start. The error is NotFound for a missing or damaged file.
func (h *History) load(podID string) (s Start, err error) {
	path := h.path(podID)
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, errdefs.NotFound("no start of pod sandbox %s is kept", podID)
	}
	if err != nil {
		return s, fmt.Errorf("read start of pod sandbox %s: %w", podID, err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return s, errdefs.NotFound("%s is not a file of at most %d bytes", path, maxFile)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return s, fmt.Errorf("read start of pod sandbox %s: %w", podID, err)
	}
	_, body, err := record.Decode(kind, data)
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	if err != nil || s.ID != podID {
		return Start{}, errdefs.NotFound("%s is damaged: %v", path, err)
	}
	return s, nil
}

// deleteDamaged deletes files that cannot be read as a start.
func (h *History) deleteDamaged() error {
	names, err := h.names()
	if err != nil {
		return err
	}
	var failed error
	for _, id := range names {
		if _, err := h.load(id); errdefs.IsNotFound(err) {
			h.log.Info("delete the trace of a pod's start", "reason", err)
			failed = errors.Join(failed, removeIfExists(h.path(id)))
		}
	}
	return failed
}

// names returns the IDs of pods with a file.
func (h *History) names() (ids []string, err error) {
	entries, err := os.ReadDir(h.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), suffix); ok {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// trim deletes the files with the oldest changes, except for Kept files.
func (h *History) trim() error {
	ids, err := h.names()
	if err != nil || len(ids) <= Kept {
		return err
	}
	changed := map[string]time.Time{}
	for _, id := range ids {
		info, err := os.Lstat(h.path(id))
		if err != nil {
			return err
		}
		changed[id] = info.ModTime()
	}
	slices.SortFunc(ids, func(a, b string) int { return changed[a].Compare(changed[b]) })
	var failed error
	for _, id := range ids[:len(ids)-Kept] {
		failed = errors.Join(failed, removeIfExists(h.path(id)))
	}
	return failed
}

// removeIfExists deletes a file of the history.
func removeIfExists(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
