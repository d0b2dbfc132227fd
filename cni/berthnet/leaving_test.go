package berthnet

import (
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// After several failures the deletion of a port ends with a log line. Other ports are deleted
// meanwhile.
func TestPortDeletionIsRetried(t *testing.T) {
	tries, deleted := 0, make(chan string, 1)
	l := leaving{again: time.Millisecond, cut: func(id, _ string) error { // called by one goroutine at a time
		if id == "stays" {
			tries++
			return errors.New("device is busy")
		}
		deleted <- id
		return nil
	}}
	log := make(logged, 1)
	lines := slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), nil))
	l.add(lines, "stays", "eth0", 0)
	l.add(lines, "lingering", "eth0", 0)
	if id := <-deleted; id != "lingering" {
		t.Errorf("deleted is %q", id)
	}
	log.await(t, "device is busy")
	l.close()
	if tries != leavingTries {
		t.Errorf("%d tries, want %d", tries, leavingTries)
	}
}

// logged is a log whose lines go to a channel.
type logged chan string

func (l logged) Write(data []byte) (int, error) {
	l <- string(data)
	return len(data), nil
}

func (l logged) await(t *testing.T, what string) {
	t.Helper()
	for limit := time.After(patience); ; {
		select {
		case line := <-l:
			if strings.Contains(line, what) {
				return
			}
		case <-limit:
			t.Fatalf("the log does not contain %q", what)
		}
	}
}
