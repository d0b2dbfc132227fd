package crilog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"
)

// All is the value of Options.Tail that selects every line.
const All = -1

// Options select the lines that Read returns.
type Options struct {
	Tail  int       // the last N lines of the file, or All
	Since time.Time // lines at or after this time; zero: every line

	// Follow keeps reading until Ended is closed or ctx ends. After Ended it reads the rest of the
	// file and returns. It also waits for a missing file.
	Follow bool
	Ended  <-chan struct{}
}

// Read calls emit with each line of the log file at path. It joins partial records. It skips
// records that are not in the CRI format. At the end it returns an error with their number and the
// first of them. An error from emit ends the reading and is returned unchanged. The error wraps
// fs.ErrNotExist if the file is missing, unless Read follows.
func Read(ctx context.Context, path string, o Options, emit func(Record) error) error {
	r := reader{path: path, options: o, emit: emit}
	if o.Follow {
		return r.follow(ctx)
	}
	return r.once(ctx)
}

// reader is the state of a Read.
type reader struct {
	path    string
	options Options
	emit    func(Record) error

	join      joiner
	tail      []Record // the last options.Tail lines, while behind is true
	behind    bool     // still reading the initial content, with Tail set
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

// follow reads, waits for more, and switches to the next file after a rotation.
func (r *reader) follow(ctx context.Context) error {
	src, err := r.awaitFile(ctx)
	if src == nil || err != nil {
		return err
	}
	defer func() { _ = src.Close() }() // opened for reading only
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
		if err := r.wait(ctx); err != nil {
			return err
		}
	}
}

// awaitFile opens the file once it exists. It returns nil if the log has ended and there is no
// file.
func (r *reader) awaitFile(ctx context.Context) (*source, error) {
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
		if err := r.wait(ctx); err != nil {
			return nil, err
		}
	}
}

// change reads the rest of the old file and opens the new one.
func (r *reader) change(ctx context.Context, old *source) (*source, error) {
	if err := r.drain(ctx, old); err != nil {
		return old, err
	}
	next, err := openSource(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return old, nil // rotated again in between: check again
	}
	if err != nil {
		return old, fmt.Errorf("open log: %w", err)
	}
	return next, old.Close()
}

// ended reports whether the writer has ended.
func (r *reader) ended() bool {
	select {
	case <-r.options.Ended: // never ready for a nil channel
		return true
	default:
		return false
	}
}

// catchUp reads the initial content and emits its last Tail lines. Without Follow an incomplete
// last line counts as a line.
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

// drain emits every complete line up to the current end of the file.
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

// give emits a line, or keeps it in the tail during the initial reading.
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
		r.tail[0] = Record{} // release its content
		r.tail = r.tail[1:]
	}
	return nil
}

// finish ends following after the writer has ended.
func (r *reader) finish() error {
	if err := r.flush(); err != nil {
		return err
	}
	return r.report()
}

// flush emits incomplete lines.
func (r *reader) flush() error {
	for _, line := range r.join.flush() {
		if err := r.give(line); err != nil {
			return err
		}
	}
	return nil
}

// report returns an error that counts the malformed records.
func (r *reader) report() error {
	if r.malformed > 0 {
		return fmt.Errorf("read log %s: %d malformed record(s), the first: %w", r.path, r.malformed, r.firstBad)
	}
	return nil
}

// lookAgain is the time between two looks at the file. inotify would tell changes sooner, but
// kubelet and the pods of a full node may have taken all of the user's instances.
const lookAgain = 100 * time.Millisecond

// wait returns nil when the file may have changed.
func (r *reader) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.options.Ended: // never ready for a nil channel
	case <-time.After(lookAgain):
	}
	return nil
}
