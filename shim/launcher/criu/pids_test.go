package criu_test

import (
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"

	"berth/shim/launcher/criu"
)

// Every ID of a process counts, also those of its threads, group and session.
func TestHighestPID(t *testing.T) {
	t.Parallel()
	entry := func(pid, ppid, pgid, sid uint32, threads ...uint32) *pstree.PstreeEntry {
		return &pstree.PstreeEntry{Pid: &pid, Ppid: &ppid, Pgid: &pgid, Sid: &sid, Threads: threads}
	}
	for _, test := range []struct {
		name  string
		first *pstree.PstreeEntry
		want  int
	}{
		{"process", entry(300, 0, 1, 1, 30), 300},
		{"group", entry(3, 0, 301, 1, 3), 301},
		{"session", entry(3, 0, 1, 302, 3), 302},
		{"ended process", entry(304, 0, 1<<32-1, 1<<32-1, 304), 304},
		{"zombie, whose thread CRIU leaves uninitialized", entry(305, 1, 1<<32-1, 1<<32-1, 1457904656), 305},
		{"thread", entry(3, 0, 1, 1, 3, 303, 4), 303},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			image(t, dir, "pstree.img", tree, test.first, entry(7, 3, 7, 7, 7))
			if got, err := criu.HighestPID(dir); err != nil || got != test.want {
				t.Errorf("%d, %v, want %d", got, err, test.want)
			}
		})
	}
	dir := t.TempDir()
	if _, err := criu.HighestPID(dir); err == nil {
		t.Error("no error without an image")
	}
	image(t, dir, "pstree.img", mounts)
	if _, err := criu.HighestPID(dir); err == nil {
		t.Error("no error for another image")
	}
}
