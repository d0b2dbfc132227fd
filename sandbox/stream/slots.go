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

// takeSession takes the slots of an exec with a client.
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
	p.taken++
	p.each[object]++
	return func() { p.release(object) }, nil
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
