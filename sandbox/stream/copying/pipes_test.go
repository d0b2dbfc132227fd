package copying

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
	t.Cleanup(func() { o.stop(); r.Close(); w.Close() })
	return o, func(data []byte) {
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOutputIsComplete(t *testing.T) {
	t.Parallel()
	var kept bytes.Buffer
	o, write := startOutput(t, &kept)
	want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10/16) // fills the pipe
	write(want)
	// The write end stays open, as with a background process.
	if err := o.finish(); err != nil || !bytes.Equal(kept.Bytes(), want) {
		t.Fatalf("%d bytes of %d, %v", kept.Len(), len(want), err)
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
	defer r.Close()
	defer o.stop()
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
