package stream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"berth/internal/testutil"
)

// startOutput returns an output and a function that writes into its pipe.
func startOutput(t *testing.T, to io.Writer) (*output, func([]byte)) {
	t.Helper()
	r, w, err := pipe(reading)
	testutil.Must(t, err)
	o := copyOutput(r, to, func(err error) { t.Errorf("output failed: %v", err) })
	t.Cleanup(func() { o.close(); w.Close() })
	return o, func(data []byte) {
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOutputIsComplete(t *testing.T) {
	t.Parallel()
	kept := newCapture(&outputBudget{})
	o, write := startOutput(t, kept.writer(0))
	want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10/16) // fills the pipe
	write(want)
	// The write end stays open, as with a background process.
	if err := o.finish(); err != nil || !bytes.Equal(kept.data[0], want) {
		t.Fatalf("%d bytes of %d, %v", len(kept.data[0]), len(want), err)
	}
}

func TestExcessOutputIsDiscarded(t *testing.T) {
	t.Parallel()
	kept := newCapture(&outputBudget{})
	o, write := startOutput(t, kept.writer(0))
	chunk := bytes.Repeat([]byte("x"), 1<<20)
	for range MaxOutput>>20 + 3 { // blocks if the output is not read any further
		write(chunk)
	}
	if err := o.finish(); err != nil || len(kept.data[0]) != MaxOutput {
		t.Fatalf("%d bytes kept, %v; want %d", len(kept.data[0]), err, MaxOutput)
	}
}

type brokenWriter struct{}

var errBroken = errors.New("broken")

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

// A session ends when its client accepts no more output.
func TestFailedWriteEndsSession(t *testing.T) {
	t.Parallel()
	r, w, err := pipe(reading)
	testutil.Must(t, err)
	defer w.Close()
	ctx, broken := context.WithCancelCause(context.Background())
	defer broken(nil)
	o := copyOutput(r, brokenWriter{}, broken)
	defer o.close()
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, errBroken) {
		t.Errorf("the cause is %v", cause)
	}
	if err := o.finish(); !errors.Is(err, errBroken) {
		t.Errorf("finish = %v", err)
	}
}
