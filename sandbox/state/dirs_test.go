package state

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestIDs(t *testing.T) {
	id := NewID()
	if !IsID(id) || NewID() == id {
		t.Errorf("%q", id)
	}
	for _, other := range []string{"", "trash", id[:63], id + "0", strings.Repeat("g", 64), "../" + id[3:]} {
		if IsID(other) {
			t.Errorf("%q counts as an ID", other)
		}
	}
}

// No path is inside another, except below a pod's mounts. Removing one path removes no other.
func TestPathsDoNotOverlap(t *testing.T) {
	d := Dirs{Root: "/root", State: "/state", NetNSs: "/netns"}
	a, b := NewID(), NewID()
	places := []string{d.EmptyLayer(), d.Trash(), d.Libcontainer(), d.RootPlace()}
	for _, id := range []string{a, b} {
		places = append(places, d.PodFiles(id), d.Writable(id), d.Shim(id), d.OCI(id), d.PodMounts(id), d.NetNS(id))
	}
	for i, one := range places {
		for _, other := range places[i+1:] {
			if one == other || strings.HasPrefix(one, other+"/") || strings.HasPrefix(other, one+"/") {
				t.Errorf("%s and %s overlap", one, other)
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
