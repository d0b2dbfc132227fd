package profile

import (
	"fmt"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/internal/errdefs"
)

func TestStore(t *testing.T) {
	path := t.TempDir()
	open := func() *Store {
		t.Helper()
		s, damaged, err := Open(path)
		if err != nil || len(damaged) != 0 {
			t.Fatal(damaged, err)
		}
		return s
	}
	s := open()
	for i := range maxRefs + 1 {
		if err := s.Add(fmt.Sprint("ref", i), []byte(good), nil); err != nil {
			t.Fatal(err)
		}
	}
	s = open()
	list := s.List()
	if len(list) != 1 || len(list[0].Refs) != maxRefs || list[0].Size != uint64(len(good)) {
		t.Fatalf("got %v", list)
	}
	if got, err := s.Get("ref1"); err != nil || string(got) != good {
		t.Errorf("got %s, %v", got, err)
	}
	if _, err := s.Get("ref0"); !errdefs.IsNotFound(err) {
		t.Errorf("forgotten reference: %v", err)
	}
	for range 2 {
		if err := s.Remove(digest.Digest(list[0].Digest)); err != nil {
			t.Fatal(err)
		}
	}
	if list := append(s.List(), open().List()...); len(list) != 0 {
		t.Errorf("after Remove: %v", list)
	}
}
