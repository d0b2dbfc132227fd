package profile

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// wantFull checks a refusal beyond a limit, which tells the limit and the way out.
func wantFull(t *testing.T, err error, limit string) {
	t.Helper()
	if errdefs.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "the limit is "+limit+": ") ||
		!strings.Contains(err.Error(), "RemoveSecurityProfile") {
		t.Errorf("got %v", err)
	}
}

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
	s.maxRefs = 3
	for range 2 { // the second time, everything is there
		for i := range s.maxRefs {
			if err := s.Add(fmt.Sprint("ref", i), []byte(good), nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := s.Add("ref0", []byte(good), []byte(`"evidence"`)); err != nil {
		t.Fatal(err)
	}
	wantFull(t, s.Add("more", []byte(good), nil), "3")
	wantFull(t, s.Add("more", []byte("{}"), nil), "3")
	s = open()
	list := s.List()
	if len(list) != 1 || strings.Join(list[0].Refs, " ") != "ref0 ref1 ref2" || list[0].Size != uint64(len(good)) {
		t.Fatalf("got %v", list)
	}
	if got, err := s.Get("ref1"); err != nil || string(got) != good {
		t.Errorf("got %s, %v", got, err)
	}
	if _, err := s.Get("more"); !errdefs.IsNotFound(err) {
		t.Errorf("refused reference: %v", err)
	}
	s.maxBytes = len(good) + len("ref0ref1ref2") + len(`"evidence"`)
	if err := s.Add("ref0", []byte(good), nil); err != nil { // the evidence stays
		t.Error(err)
	}
	if got, present := s.Evidence("ref0"); !present || string(got) != `"evidence"` {
		t.Errorf("evidence %s", got)
	}
	wantFull(t, s.Add("ref0", []byte(good), []byte(`"more evidence"`)), fmt.Sprint(s.maxBytes))
	wantFull(t, s.Add("ref3", []byte(good), nil), fmt.Sprint(s.maxBytes))
	for range 2 {
		if err := s.Remove(digest.Digest(list[0].Digest)); err != nil {
			t.Fatal(err)
		}
	}
	if list := append(s.List(), open().List()...); len(list) != 0 {
		t.Errorf("after Remove: %v", list)
	}
}
