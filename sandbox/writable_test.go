package sandbox

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestWritableWatchReportsUnwritableDirectory(t *testing.T) {
	var w writableWatch
	dir := t.TempDir()
	if w.Try(dir); w.Err() != nil {
		t.Errorf("a writable directory: %v", w.Err())
	}
	w.Try(dir, dir+"/missing")
	if !errors.Is(w.Err(), unix.ENOENT) {
		t.Errorf("a missing directory: %v", w.Err())
	}
	if w.Try(dir); w.Err() != nil {
		t.Errorf("after the failure: %v", w.Err())
	}
	long := time.Now().Add(-2 * writableTimeout)
	w.trying.Store(&long)
	if w.Err() == nil {
		t.Error("a hanging probe is not reported")
	}
}
