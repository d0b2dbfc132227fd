package streams

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

func TestPlaces(t *testing.T) {
	p := newPlaces("execs", 3, 2)
	var releases []func()
	take := func(object string) error {
		release, err := p.take(object)
		if err == nil {
			releases = append(releases, release)
		}
		return err
	}
	refused := func(object, text string) {
		t.Helper()
		if err := take(object); errdefs.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", object, err)
		}
	}
	for _, object := range []string{"a", "a"} {
		if err := take(object); err != nil {
			t.Fatal(err)
		}
	}
	refused("a", "a has 2 execs")
	if err := take("b"); err != nil {
		t.Fatal(err)
	}
	refused("c", "c: there are 3 execs")
	releases[0]()
	if err := take("a"); err != nil {
		t.Error(err)
	}
	for _, release := range releases[1:] {
		release()
	}
	if p.taken != 0 || len(p.each) != 0 {
		t.Errorf("left: %d, %v", p.taken, p.each)
	}
}

// What comes without a place is refused before anything is made for it, and a place is given back.
func TestSessionsHavePlaces(t *testing.T) {
	s := testStreams()
	for range 2 * testLimits.Sessions { // each ends, for nobody listens
		if err := s.PortForward(t.Context(), "ready", nobodysPort(t), nil); errdefs.Code(err) != codes.Unavailable {
			t.Fatal(err)
		}
	}
	for range testLimits.ExecsPerContainer {
		if _, err := s.execs.take("container runs-with-a-longer-id"); err != nil {
			t.Fatal(err)
		}
	}
	for range testLimits.Sessions {
		if _, err := s.attached.take("pod other"); err != nil {
			t.Fatal(err)
		}
	}
	_, exec := s.ExecSync(t.Context(), "runs", []string{"true"}, 0)
	_, session := s.Exec(t.Context(), "runs", []string{"true"}, false, noClient)
	for name, err := range map[string]error{"ExecSync": exec, "Exec": session, "Attach": s.Attach(t.Context(), "runs", false, noClient),
		"PortForward": s.PortForward(t.Context(), "ready", 1, nil)} {
		if errdefs.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: %v", name, err)
		}
	}
}
