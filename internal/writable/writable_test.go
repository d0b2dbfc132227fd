package writable

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestWatch(t *testing.T) {
	var w Watch
	dir := t.TempDir()
	if w.Try(dir); w.Err() != nil {
		t.Errorf("a directory that can be written to: %v", w.Err())
	}
	w.Try(dir, dir+"/missing")
	if !errors.Is(w.Err(), unix.ENOENT) {
		t.Errorf("one that is not there: %v", w.Err())
	}
	if w.Try(dir); w.Err() != nil {
		t.Errorf("trouble that is over: %v", w.Err())
	}
	long := time.Now().Add(-2 * patience)
	w.trying.Store(&long)
	if w.Err() == nil {
		t.Error("a try that hangs is not told of")
	}
}
