package sandbox

import (
	"bytes"
	"testing"
)

func TestCollectorReturnsWhatWasWritten(t *testing.T) {
	c, err := newCollector()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10/16) // fills the pipe
	if _, err := c.w.Write(want); err != nil {
		t.Fatal(err)
	}
	// The writing end stays open, as a background process would keep it.
	got, err := c.finish()
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(want), err)
	}
}

func TestCollectorDiscardsBeyondTheCap(t *testing.T) {
	c, err := newCollector()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	chunk := bytes.Repeat([]byte("x"), 1<<20)
	for range maxExecOutput>>20 + 3 { // blocks if nobody reads on
		if _, err := c.w.Write(chunk); err != nil {
			t.Fatal(err)
		}
	}
	got, err := c.finish()
	if err != nil || len(got) != maxExecOutput {
		t.Fatalf("%d bytes kept, %v; want %d", len(got), err, maxExecOutput)
	}
}
