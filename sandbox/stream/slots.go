package stream

import (
	"fmt"
	"sync"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// Limits bounds what clients may have under way. Each exec has a launcher, a process that the daemon's memory is no limit for.
type Limits struct {
	Execs             int // in all containers, ExecSync's too
	ExecsPerContainer int
	Sessions          int // of Attach, and connections to forwarded ports; a pod may have half of them
}

// podSessions is how many sessions a pod may have: it leaves as many to the others.
func (l Limits) podSessions() int { return max(1, l.Sessions/2) }

// execSessions is how many execs may be clients' sessions, which last as long as these want. A quarter is left to probes and
// hooks: those of other pods fail without a place.
func (l Limits) execSessions() int { return l.Execs - l.Execs/4 }

// takeSession takes the places of an exec session.
func (s *Service) takeSession(c ContainerTarget) (release func(), err error) {
	releaseSession, err := s.connected.take(c.String())
	if err != nil {
		return nil, err
	}
	releaseExec, err := s.execs.take(c.String())
	if err != nil {
		releaseSession()
		return nil, err
	}
	return func() { releaseExec(); releaseSession() }, nil
}

// slots counts what is under way. The lock guards the counts and is held for that only.
type slots struct {
	what    string // "execs"
	max     int
	maxEach int          // for one object
	spare   func() error // tells whether there are descriptors; nil: not asked

	mu    sync.Mutex
	taken int
	each  map[string]int
}

func newSlots(what string, all, each int) *slots {
	return &slots{what: what, max: all, maxEach: each, each: map[string]int{}}
}

// take takes a place until release is called. ResourceExhausted if there is none.
func (p *slots) take(object string) (release func(), err error) {
	if p.spare != nil {
		if err := p.spare(); err != nil {
			return nil, fmt.Errorf("%s: %w", object, err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken >= p.max {
		return nil, errdefs.New(codes.ResourceExhausted, "%s: there are %d %s, which is the limit", object, p.taken, p.what)
	}
	if p.each[object] >= p.maxEach {
		return nil, errdefs.New(codes.ResourceExhausted, "%s has %d %s, which is the limit", object, p.each[object], p.what)
	}
	p.taken++
	p.each[object]++
	return func() { p.release(object) }, nil
}

func (p *slots) release(object string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken--
	if p.each[object]--; p.each[object] == 0 {
		delete(p.each, object)
	}
}
