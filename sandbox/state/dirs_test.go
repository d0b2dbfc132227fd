package state

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/task"
)

func TestIDs(t *testing.T) {
	id := NewID()
	if !IsID(id) || NewID() == id {
		t.Errorf("%q", id)
	}
	for _, other := range []string{"", "trash", id[:63], id + "0", strings.Repeat("g", 64), "../" + id[3:]} {
		if IsID(other) {
			t.Errorf("%q counts as ours", other)
		}
	}
}

// No two places are the same or within each other, but those of one pod's mounts: who removes one removes nothing else.
func TestPlacesAreApart(t *testing.T) {
	d := Dirs{Root: "/root", State: "/state", NetNSs: "/netns"}
	a, b := NewID(), NewID()
	places := []string{d.EmptyLayer(), d.Trash(), d.Libcontainer(), d.RootPlace()}
	for _, id := range []string{a, b} {
		places = append(places, d.PodFiles(id), d.Writable(id), d.Shim(id), d.OCI(id), d.PodMounts(id), d.NetNS(id))
	}
	for i, one := range places {
		for _, other := range places[i+1:] {
			if one == other || strings.HasPrefix(one, other+"/") || strings.HasPrefix(other, one+"/") {
				t.Errorf("%s and %s", one, other)
			}
		}
	}
	for _, place := range []string{d.Tmpfs(a), d.OldShm(a), d.UserNS(a)} {
		if filepath.Dir(place) != d.PodMounts(a) {
			t.Errorf("%s is not removed with the pod's mounts", place)
		}
	}
	for _, place := range []string{d.Etc(a), d.Shm(a)} {
		if filepath.Dir(place) != d.Tmpfs(a) {
			t.Errorf("%s is not removed with the pod's tmpfs", place)
		}
	}
}

// What is discarded is out of its place at once and gone by and by, also what an earlier daemon left, in either version's trash.
func TestTrash(t *testing.T) {
	d := Dirs{Root: t.TempDir()}
	tasks := task.NewRunner(slog.New(slog.DiscardHandler), nil)
	trash := NewTrash(d, tasks)
	old := filepath.Join(d.Root, "trash")
	tree := func(dir string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, "deep/er"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{d.Writable("c"), filepath.Join(d.Trash(), "left"), filepath.Join(old, "older")} {
		tree(dir)
	}
	if err := trash.Discard(d.Writable("c")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(d.Writable("c")); !os.IsNotExist(err) {
		t.Errorf("it is still in its place: %v", err)
	}
	tree(d.Writable("c")) // the same name is free again
	if err := trash.Discard(d.Writable("unknown")); err != nil {
		t.Errorf("what is not there: %v", err)
	}
	if err := trash.Sweep(); err != nil {
		t.Fatal(err)
	}
	tasks.Background.Close()
	if err := tasks.Background.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(d.Trash()); err != nil || len(left) > 0 {
		t.Errorf("in the trash are %v (%v)", left, err)
	}
	if _, err := os.Lstat(old); !os.IsNotExist(err) {
		t.Errorf("the earlier version's trash is still there: %v", err)
	}
	if _, err := os.Lstat(d.Writable("c")); err != nil {
		t.Errorf("what is in use was removed: %v", err)
	}
}
