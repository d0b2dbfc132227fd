package podrun

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"sync"

	"berth/cmd/berth/crilog"
	"berth/cmd/berth/podyaml"
)

// printer writes lines of several containers, each after the container's name.
type printer struct {
	stdout, stderr io.Writer
	several        bool // several pods run, so the pod's name precedes the container's name

	mu sync.Mutex // serializes lines
}

func (p *printer) print(container string, r crilog.Record) error {
	line := make([]byte, 0, len(container)+len(r.Content)+4)
	line = append(line, '[')
	line = append(line, container...)
	line = append(line, "] "...)
	line = append(line, r.Content...)
	line = append(line, '\n')
	w := p.stdout
	if r.Stream == crilog.Stderr {
		w = p.stderr
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := w.Write(line); err != nil {
		return &outputError{err}
	}
	return nil
}

// outputError means that berth's own output cannot be written, for example to a closed pipe.
type outputError struct{ err error }

func (e *outputError) Error() string { return "write output: " + e.err.Error() }
func (e *outputError) Unwrap() error { return e.err }

// follow prints a container's log until the container has exited or ctx ends.
func (p *printer) follow(ctx context.Context, pod, container, path string, exited <-chan struct{}) error {
	if p.several {
		container = pod + "/" + container
	}
	err := crilog.Read(
		ctx,
		path,
		crilog.Options{Tail: crilog.All, Follow: true, Ended: exited},
		func(r crilog.Record) error {
			return p.print(container, r)
		},
	)
	var unwritten *outputError
	if ctx.Err() != nil && !errors.As(err, &unwritten) {
		return nil // the cause is reported elsewhere
	}
	return err
}

func (r *podRun) logPath(c podyaml.Container) string {
	return filepath.Join(r.plan.LogDir, podyaml.LogPath(c.Name))
}
