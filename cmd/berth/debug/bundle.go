package debug

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"sync"
	"time"
)

const (
	// maxPart bounds the content of a part, in bytes.
	maxPart = 16 << 20
	// maxParallel is the number of parts that are collected at the same time.
	maxParallel = 4
)

// result is a collected part.
type result struct {
	name    string
	content clean
	err     error
	took    time.Duration
}

// collect collects all parts, each within the timeout. It returns them in the given order. If a
// part exceeds it is abandoned, because a goroutine that blocks in the kernel cannot be stopped.
func collect(ctx context.Context, parts []part, timeout time.Duration) []result {
	results := make([]result, len(parts))
	slots := make(chan struct{}, maxParallel)
	var all sync.WaitGroup
	for i, p := range parts {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			results[i] = p.run(ctx, timeout)
		})
	}
	all.Wait()
	return results
}

// lateTimeout is how long a part may take to react to the end of its context.
const lateTimeout = time.Second

func (p part) run(ctx context.Context, timeout time.Duration) result {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	collected := make(chan result, 1)
	go func() {
		content, err := p.collect(ctx)
		if len(content) > maxPart {
			content = content[:maxPart]
			err = errors.Join(err, fmt.Errorf("cut after %d bytes", maxPart))
		}
		collected <- result{name: p.name, content: content, err: err}
	}()
	r := result{name: p.name}
	select {
	case r = <-collected:
	case <-time.After(timeout + lateTimeout):
		r.err = fmt.Errorf("not finished within %v: %w", timeout, context.DeadlineExceeded)
	}
	r.took = time.Since(began)
	return r
}

// write writes the bundle with a summary as its first file. Errors are free text.
func (m *masker) write(w io.Writer, dir string, results []result) error {
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	all := append([]result{{name: "SUMMARY.txt", content: m.summary(results)}}, results...)
	for _, r := range all {
		if len(r.content) == 0 {
			continue
		}
		header := &tar.Header{Name: path.Join(dir, r.name), Mode: 0o600, Size: int64(len(r.content)), ModTime: time.Now()}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(r.content); err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), compressed.Close())
}

// summary lists the parts with their times and errors.
func (m *masker) summary(results []result) clean {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%-24s %10s %8s  %s\n", "PART", "BYTES", "SECONDS", "NOTE")
	for _, r := range results {
		note := "ok"
		if r.err != nil {
			note = m.text(r.err.Error())
		}
		fmt.Fprintf(&b, "%-24s %10d %8.2f  %s\n", r.name, len(r.content), r.took.Seconds(), note)
	}
	return b.Bytes()
}
