package session

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// Whatever the order in which two streams come, each has the beginning of what was written, half of the room if it wants it, and
// both fill it.
func TestCapture(t *testing.T) {
	const limit = 100
	for _, want := range []struct{ out, err, keptOut, keptErr int }{
		{0, 0, 0, 0}, {40, 60, 40, 60}, {100, 0, 100, 0}, {110, 0, 100, 0}, {0, 110, 0, 100}, {200, 200, 50, 50}, {200, 30, 70, 30}, {30, 200, 30, 70},
	} {
		for range 20 {
			all := &Outputs{}
			c := &capture{all: all, max: limit}
			left := [2][]byte{bytes.Repeat([]byte("o"), want.out), bytes.Repeat([]byte("e"), want.err)}
			for len(left[0])+len(left[1]) > 0 {
				stream := rand.IntN(2)
				n := min(len(left[stream]), 1+rand.IntN(30))
				if written, err := c.writer(stream).Write(left[stream][:n]); err != nil || written != n {
					t.Fatalf("%d of %d bytes written: %v", written, n, err)
				}
				left[stream] = left[stream][n:]
			}
			if len(c.data[0]) != want.keptOut || len(c.data[1]) != want.keptErr {
				t.Errorf("of %d and %d bytes %d and %d were kept, want %d and %d", want.out, want.err, len(c.data[0]), len(c.data[1]), want.keptOut, want.keptErr)
			}
			c.release()
			if held := all.held.Load(); held != 0 {
				t.Errorf("%d bytes are not given back", held)
			}
		}
	}
}

// All commands together have a limit, beyond which one fails, and others go on when it has given back what it had.
func TestOutputsOfAll(t *testing.T) {
	all := &Outputs{}
	chunk := make([]byte, MaxOutput)
	var held []*capture
	for range maxHeld / MaxOutput {
		c := newCapture(all)
		if _, err := c.writer(0).Write(chunk); err != nil {
			t.Fatal(err)
		}
		held = append(held, c)
	}
	late := newCapture(all)
	if _, err := late.writer(1).Write([]byte("x")); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the limit: %v", err)
	}
	held[0].release()
	if _, err := late.writer(1).Write([]byte("x")); err != nil {
		t.Error(err)
	}
}
