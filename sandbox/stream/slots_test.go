package stream

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestSlots(t *testing.T) {
	t.Parallel()
	p := newSlots("execs", 3, 2)
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
		testutil.Must(t, take(object))
	}
	refused("a", "a: its limit of 2 execs")
	testutil.Must(t, take("b"))
	refused("c", "c: the node's limit of 3 execs")
	releases[0]()
	testutil.Must(t, take("a"))
	for _, release := range releases[1:] {
		release()
	}
	if p.taken != 0 || len(p.each) != 0 {
		t.Errorf("left: %d, %v", p.taken, p.each)
	}
}

// A session without a free slot is refused before it allocates anything. Every slot is released.
func TestSessionsNeedSlots(t *testing.T) {
	s := testStreams()
	for range 2 * testLimits.Sessions { // each fails, because the port is closed
		if err := forward(t, s, "ready", closedPort(t)); errdefs.Code(err) != codes.Unavailable {
			t.Fatal(err)
		}
	}
	for range testLimits.ExecsPerContainer {
		if _, err := s.execs.take("container runs-with-a-longer-id"); err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range []string{"pod other", "pod another"} { // each pod has half of them
		for range testLimits.Sessions / 2 {
			if _, err := s.attached.take(pod); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, exec := s.ExecSync(t.Context(), "runs", []string{"true"}, 0)
	session := start(t, s)
	for name, err := range map[string]error{"ExecSync": exec, "Exec": session, "Attach": attach(t, s),
		"PortForward": forward(t, s, "ready", 1)} {
		t.Run(name, func(t *testing.T) {
			if errdefs.Code(err) != codes.ResourceExhausted {
				t.Error(err)
			}
		})
	}
}

// A pod has at most half of the sessions, for its containers and ports together.
func TestSessionsLeaveSlotsForOtherPods(t *testing.T) {
	s := testStreams()
	for range testLimits.Sessions / 2 {
		if _, err := s.attached.take("pod ready-with-a-longer-id"); err != nil {
			t.Fatal(err)
		}
	}
	for name, err := range map[string]error{"Attach": attach(t, s), "PortForward": forward(t, s, "ready", 1)} {
		t.Run(name, func(t *testing.T) {
			if errdefs.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "pod ready-with-a-longer-id: its limit of 2") {
				t.Error(err)
			}
		})
	}
	if err := forward(t, s, "sandboxed", closedPort(t)); errdefs.Code(err) == codes.ResourceExhausted {
		t.Errorf("another pod: %v", err)
	}
	if got := (Limits{Sessions: 1}).podSessions(); got != 1 {
		t.Errorf("with a limit of 1 a pod may have %d", got)
	}
}

// Sessions of clients leave slots for probes.
func TestSessionsLeaveSlotsForProbes(t *testing.T) {
	s := testStreams()
	var releases []func()
	take := func(take func(ContainerTarget) (func(), error), id string) error {
		release, err := take(ContainerTarget{ID: id})
		if err == nil {
			releases = append(releases, release)
		}
		return err
	}
	session := func(c ContainerTarget) (func(), error) { return s.beginExec(c, limited) }
	probe := func(c ContainerTarget) (func(), error) { return s.execs.take(c.String()) }
	sessions := 0
	for id := 'a'; ; id++ { // one per container
		if err := take(session, string(id)); err != nil {
			if errdefs.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "exec sessions") {
				t.Error(err)
			}
			break
		}
		sessions++
	}
	for range testLimits.Execs - sessions {
		if err := take(probe, "probed"); err != nil {
			t.Errorf("beside %d sessions: %v", sessions, err)
		}
	}
	if sessions == testLimits.Execs {
		t.Error("no slot is left")
	}
	if err := take(probe, "other"); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the limit of all: %v", err)
	}
	releases[0]()
	testutil.Must(t, take(probe, "other"))
	// The failed call released the slot of the session.
	if err := take(session, "other"); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("session without a slot for its exec: %v", err)
	}
	for _, release := range releases[1:] {
		release()
	}
	if s.execs.taken != 0 || s.connected.taken != 0 || len(s.connected.each) != 0 {
		t.Errorf("left: %d, %d, %v", s.execs.taken, s.connected.taken, s.connected.each)
	}
}

// Without spare descriptors no session starts and no slot is taken.
func TestSessionsNeedSpareDescriptors(t *testing.T) {
	t.Parallel()
	s := testStreams()
	none := errdefs.New(codes.ResourceExhausted, "no spare descriptors")
	s.connected.spare = func() error { return none }
	s.attached.spare = s.connected.spare
	exec := start(t, s)
	for name, err := range map[string]error{"Exec": exec, "Attach": attach(t, s), "PortForward": forward(t, s, "ready", 1)} {
		t.Run(name, func(t *testing.T) {
			if errdefs.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "no spare descriptors") {
				t.Error(err)
			}
		})
	}
	if s.execs.taken+s.connected.taken+s.attached.taken != 0 {
		t.Error("slots are taken")
	}
}

// A session that an earlier daemon has begun counts, also beyond the limits.
func TestResumedSessionsCount(t *testing.T) {
	t.Parallel()
	s := testStreams()
	var releases []func()
	for _, kind := range []string{"exec", "attach", "portforward"} {
		for range 2 * testLimits.Execs {
			releases = append(releases, s.Resume(kind, "runs"))
		}
	}
	for name, err := range map[string]error{"Exec": start(t, s), "Attach": attach(t, s)} {
		if errdefs.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, release := range releases {
		release()
	}
	if s.execs.taken+s.connected.taken+s.attached.taken != 0 {
		t.Error("slots are left")
	}
}
