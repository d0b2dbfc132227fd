package crilog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// All as Options.Tail asks for every line.
const All = -1

// Options select what Read gives out.
type Options struct {
	Tail  int       // the last so many lines of what is there; All for every line
	Since time.Time // only lines at or after; zero for every line

	// Follow keeps reading until Ended is closed (then the rest of the file is
	// read and Read returns) or the context is done. It also waits for a file
	// that does not exist yet.
	Follow bool
	Ended  <-chan struct{}
}

// Read gives the lines of the log file at path to emit, partial records joined.
// Records that are not in the CRI format are counted and named in the error
// after everything else was given out. An error from emit ends the reading and
// is returned as it is. A missing file is fs.ErrNotExist, unless following.
func Read(ctx context.Context, path string, o Options, emit func(Record) error) error {
	r := reader{path: path, options: o, emit: emit}
	if o.Follow {
		return r.follow(ctx)
	}
	return r.once(ctx)
}

// reader is the state of one Read.
type reader struct {
	path    string
	options Options
	emit    func(Record) error

	join      joiner
	tail      []Record // ring of the last options.Tail lines, while behind is true
	behind    bool     // still reading what was there at the start, with Tail set
	malformed int
	firstBad  error
}

func (r *reader) once(ctx context.Context) error {
	src, err := openSource(r.path)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	err = r.catchUp(ctx, src)
	if err == nil {
		err = r.report()
	}
	return errors.Join(err, src.Close())
}

// follow reads, waits for more, and changes to the next file after a rotation.
func (r *reader) follow(ctx context.Context) error {
	watch, err := newWatch(r.path)
	if err != nil {
		return err
	}
	defer watch.Close()
	src, err := r.awaitFile(ctx, watch)
	if src == nil || err != nil {
		return err
	}
	defer func() { _ = src.Close() }() // opened for reading: nothing to lose
	if err := r.catchUp(ctx, src); err != nil {
		return err
	}
	for {
		ended := r.ended()
		if err := r.drain(ctx, src); err != nil {
			return err
		}
		if src.replaced(r.path) {
			if src, err = r.change(ctx, src); err != nil {
				return err
			}
			continue
		}
		if ended {
			return r.finish()
		}
		if err := watch.wait(ctx, r.options.Ended); err != nil {
			return err
		}
	}
}

// awaitFile opens the file once it exists; nil if the log ended without one.
func (r *reader) awaitFile(ctx context.Context, watch *watch) (*source, error) {
	for {
		ended := r.ended()
		src, err := openSource(r.path)
		switch {
		case err == nil:
			return src, nil
		case !errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("open log: %w", err)
		case ended:
			return nil, nil
		}
		if err := watch.wait(ctx, r.options.Ended); err != nil {
			return nil, err
		}
	}
}

// change reads what the writer put into the old file last, and opens the new one.
func (r *reader) change(ctx context.Context, old *source) (*source, error) {
	if err := r.drain(ctx, old); err != nil {
		return old, err
	}
	next, err := openSource(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return old, nil // rotated again in between: look again
	}
	if err != nil {
		return old, fmt.Errorf("open log: %w", err)
	}
	return next, old.Close()
}

// ended reports whether the writer is gone.
func (r *reader) ended() bool {
	select {
	case <-r.options.Ended: // a nil channel never is
		return true
	default:
		return false
	}
}

// catchUp reads what is there and gives out its last Tail lines. Unless more is
// to follow, a last line without its end counts as one.
func (r *reader) catchUp(ctx context.Context, src *source) error {
	r.behind = r.options.Tail >= 0
	if err := r.drain(ctx, src); err != nil {
		return err
	}
	if !r.options.Follow {
		if err := r.flush(); err != nil {
			return err
		}
	}
	r.behind = false
	for _, line := range r.tail {
		if err := r.emit(line); err != nil {
			return err
		}
	}
	r.tail = nil
	return nil
}

// drain gives out every complete line up to the present end of the file.
func (r *reader) drain(ctx context.Context, src *source) error {
	for ctx.Err() == nil {
		raw, err := src.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		record, err := Parse(raw)
		if err != nil {
			r.malformed++
			if r.firstBad == nil {
				r.firstBad = err
			}
			continue
		}
		if line, ok := r.join.add(record); ok {
			if err := r.give(line); err != nil {
				return err
			}
		}
	}
	return context.Cause(ctx)
}

// give passes a line on, or keeps it in the tail while the beginning is read.
func (r *reader) give(line Record) error {
	switch {
	case line.Time.Before(r.options.Since):
		return nil
	case !r.behind:
		return r.emit(line)
	case r.options.Tail == 0:
		return nil
	}
	r.tail = append(r.tail, line)
	if len(r.tail) > r.options.Tail {
		r.tail[0] = Record{} // let its content go
		r.tail = r.tail[1:]
	}
	return nil
}

// finish ends the following of a log whose writer is gone.
func (r *reader) finish() error {
	if err := r.flush(); err != nil {
		return err
	}
	return r.report()
}

// flush gives out lines that will not get their end.
func (r *reader) flush() error {
	for _, line := range r.join.flush() {
		if err := r.give(line); err != nil {
			return err
		}
	}
	return nil
}

// report returns an error that counts the records that were no CRI records.
func (r *reader) report() error {
	if r.malformed > 0 {
		return fmt.Errorf("read log %s: %d malformed record(s), the first: %w", r.path, r.malformed, r.firstBad)
	}
	return nil
}

// watch wakes up when something changed in the directory of a log file.
type watch struct {
	notify *fsnotify.Watcher
	tick   *time.Ticker
}

// lookAgain is how long a missed event can delay a line: inotify drops events
// when its queue is full, and some filesystems have none.
const lookAgain = time.Second

// newWatch watches the directory, not the file: a rotation replaces the file,
// and an inotify watch on a directory sees writes to all files in it.
func newWatch(path string) (*watch, error) {
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch log %s: %w", path, err)
	}
	dir := filepath.Dir(path)
	if err := notify.Add(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("watch log directory %s: %w", dir, err), notify.Close())
	}
	return &watch{notify: notify, tick: time.NewTicker(lookAgain)}, nil
}

// wait returns nil when it is worth looking at the file again.
func (w *watch) wait(ctx context.Context, ended <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-ended:
	case <-w.notify.Events:
	case <-w.notify.Errors: // overflow: events were lost, so look
	case <-w.tick.C:
	}
	return nil
}

// Close ends the watch; errors of an inotify descriptor's close mean nothing to a reader.
func (w *watch) Close() {
	w.tick.Stop()
	_ = w.notify.Close()
}
