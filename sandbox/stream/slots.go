package stream

import (
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// Limits limits concurrent sessions. Each exec needs a launcher, a process outside of the daemon's
// memory limit.
type Limits struct {
	Execs             int // in all containers, including ExecSync
	ExecsPerContainer int
	Sessions          int // attached containers and forwarded connections; one pod may have half of them
}

// podSessions returns the limit per pod. It leaves the same number of slots to other pods.
func (l Limits) podSessions() int { return max(1, l.Sessions/2) }

// execSessions limits the execs with a client, which may last forever. A quarter of the slots is
// reserved for probes and hooks, which would fail without a slot.
func (l Limits) execSessions() int { return l.Execs - l.Execs/4 }

// claim is a slot that a session takes.
type claim struct {
	*slots
	object string
}

// taker takes the slot of a claim: limited or resumed.
type taker func(claim) (release func(), err error)

// limited refuses a slot beyond the limits.
func limited(c claim) (release func(), err error) { return c.take(c.object) }

// resumed takes the slot of a session that an earlier daemon has begun.
func resumed(c claim) (release func(), err error) { return c.add(c.object), nil }

// begin takes the slots of a session, or none, and records the wait for its end.
func (s *Service) begin(what, object string, take taker, claims ...claim) (release func(), err error) {
	var taken []func()
	release = func() {
		for _, r := range taken {
			r()
		}
	}
	for _, c := range claims {
		r, err := take(c)
		if err != nil {
			release()
			return nil, err
		}
		taken = append(taken, r)
	}
	taken = append(taken, s.tasks.BeginOpen(what, object))
	return release, nil
}

// beginExec begins an exec with a client.
func (s *Service) beginExec(c ContainerTarget, take taker) (release func(), err error) {
	return s.begin("end of exec", c.String(), take, claim{s.connected, c.String()}, claim{s.execs, c.String()})
}

// beginAttach begins the session of an attached client.
func (s *Service) beginAttach(c ContainerTarget, take taker) (release func(), err error) {
	claims := []claim{{s.attached, c.pod().String()}}
	if c.Terminal {
		claims = append(claims, claim{s.terminals, c.String()})
	}
	return s.begin("end of attached session", c.String(), take, claims...)
}

// beginForward begins a forwarded connection.
func (s *Service) beginForward(pod PodTarget, take taker) (release func(), err error) {
	return s.begin("end of forwarded connection", pod.String(), take, claim{s.attached, pod.String()})
}

// Resume counts a session of the kind "exec", "attach" or "portforward" that an earlier daemon has
// begun, beside the limits, until release is called.
func (s *Service) Resume(kind, id string) (release func()) {
	if kind == "portforward" {
		release, _ = s.beginForward(PodTarget{ID: id}, resumed) // resumed does not fail
		return release
	}
	c, err := s.targets.StreamContainer(id)
	if err != nil { // it was removed while no daemon ran
		c = ContainerTarget{ID: id}
	}
	begin := s.beginAttach
	if kind == "exec" {
		begin = s.beginExec
	}
	release, _ = begin(c, resumed)
	return release
}

// slots counts sessions. The lock guards the counts. It is held only while they are changed.
type slots struct {
	what    string // "execs"
	max     int
	maxEach int          // per object
	spare   func() error // fails if there are no spare descriptors; nil: not checked

	mu sync.Mutex
	// +checklocks:mu
	taken int
	// +checklocks:mu
	each map[string]int
}

func newSlots(what string, all, each int) *slots {
	return &slots{what: what, max: all, maxEach: each, each: map[string]int{}}
}

// take takes a slot until release is called. The error is ResourceExhausted.
func (p *slots) take(object string) (release func(), err error) {
	if p.spare != nil {
		if err := p.spare(); err != nil {
			return nil, fmt.Errorf("%s: %w", object, err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken >= p.max {
		return nil, errdefs.New(codes.ResourceExhausted, "%s: the node's limit of %d %s is reached",
			object, p.taken, p.what)
	}
	if p.each[object] >= p.maxEach {
		return nil, errdefs.New(codes.ResourceExhausted, "%s: its limit of %d %s is reached",
			object, p.each[object], p.what)
	}
	return p.addLocked(object), nil
}

// add takes a slot beside the limits.
func (p *slots) add(object string) (release func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.addLocked(object)
}

// +checklocks:p.mu
func (p *slots) addLocked(object string) (release func()) {
	p.taken++
	p.each[object]++
	return func() { p.release(object) }
}

// count returns the number of taken slots of an object.
func (p *slots) count(object string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.each[object]
}

func (p *slots) release(object string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken--
	if p.each[object]--; p.each[object] == 0 {
		delete(p.each, object)
	}
}
