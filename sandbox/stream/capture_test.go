package stream

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// In any order of writes, each stream keeps its beginning and may use half of the room. Together
// the streams use all room.
func TestCapture(t *testing.T) {
	t.Parallel()
	const limit = 100
	for _, want := range []struct{ out, err, keptOut, keptErr int }{
		{0, 0, 0, 0}, {40, 60, 40, 60}, {100, 0, 100, 0}, {110, 0, 100, 0}, {0, 110, 0, 100}, {200, 200, 50, 50}, {200, 30, 70, 30}, {30, 200, 30, 70},
	} {
		t.Run(fmt.Sprintf("%d %d", want.out, want.err), func(t *testing.T) {
			for range 20 {
				all := &outputBudget{}
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
					t.Errorf("kept %d and %d bytes, want %d and %d", len(c.data[0]), len(c.data[1]), want.keptOut, want.keptErr)
				}
				c.release()
				if held := all.held.Load(); held != 0 {
					t.Errorf("%d bytes were not released", held)
				}
			}
		})
	}
}

// All commands share a budget. A command that writes much fails when the budget is used up. Others
// continue after the failed command has released its part. A command that writes little never
// fails.
func TestOutputBudget(t *testing.T) {
	t.Parallel()
	all := &outputBudget{}
	chunk := make([]byte, MaxOutput)
	var held []*capture
	for {
		c := newCapture(all)
		if _, err := c.writer(0).Write(chunk); err != nil {
			break
		}
		held = append(held, c)
	}
	if len(held) < maxHeld/MaxOutput {
		t.Errorf("%d outputs fit into the budget", len(held))
	}
	much, little := newCapture(all), newCapture(all)
	for stream, own := range [][]byte{chunk[:ownOutput-1], chunk[:1]} {
		if _, err := little.writer(stream).Write(own); err != nil {
			t.Errorf("little: %v", err)
		}
	}
	if _, err := much.writer(1).Write(chunk); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the limit: %v", err)
	}
	held[0].release()
	if _, err := much.writer(1).Write(chunk); err != nil {
		t.Error(err)
	}
	for _, c := range append(held[1:], much, little) {
		c.release()
	}
	if left := all.held.Load(); left != 0 {
		t.Errorf("%d bytes were not released", left)
	}
}

// What exceeds the limit is discarded without an error.
func TestExcessOutputIsDiscarded(t *testing.T) {
	t.Parallel()
	kept := newCapture(&outputBudget{})
	w := kept.writer(0)
	chunk := make([]byte, 1<<20)
	for range MaxOutput>>20 + 3 {
		if n, err := w.Write(chunk); n != len(chunk) || err != nil {
			t.Fatal(n, err)
		}
	}
	if stdout, _ := kept.kept(); len(stdout) != MaxOutput {
		t.Fatalf("%d bytes kept, want %d", len(stdout), MaxOutput)
	}
}
