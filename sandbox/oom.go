package sandbox

import (
	"sync"

	"berth/sandbox/state"
)

// oomCounter counts the processes in containers that the OOM killer has killed since the daemon's
// start. The lock guards all fields.
type oomCounter struct {
	mu sync.Mutex
	// +checklocks:mu
	total uint64
	// +checklocks:mu
	counted map[string]uint64 // kills of each running container so far, by ID
}

// begin adds a running container. Its kills so far do not count, because an earlier daemon has
// counted them.
func (o *oomCounter) begin(id string, already uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.counted == nil {
		o.counted = map[string]uint64{}
	}
	o.counted[id] = already
}

// update counts further kills of a container. It does nothing for a container that has exited
// meanwhile.
func (o *oomCounter) update(id string, kills uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before, running := o.counted[id]
	if running && kills > before {
		o.total += kills - before
		o.counted[id] = kills
	}
}

// end counts the last kills of a container that has exited. killed reports whether its exit record
// has a kill. The record counts if the cgroup is gone.
func (o *oomCounter) end(id string, kills uint64, killed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.counted[id]
	delete(o.counted, id)
	if killed {
		kills = max(kills, 1)
	}
	if kills > before {
		o.total += kills - before
	}
}

func (o *oomCounter) sum() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.total
}

// oomKillsSoFar returns how many processes in containers the OOM killer has killed since the
// daemon's start. It reads one file for each running container.
func (s *meters) oomKillsSoFar() uint64 {
	for _, c := range s.objects.containers.Snapshot() {
		if c.running.Load() != nil {
			s.oomKills.update(c.ID, s.readOOMKills(c))
		}
	}
	return s.oomKills.sum()
}

// countExit counts the OOM kills of a container that has exited.
func (s *meters) countExit(c *container, exit state.Exit) {
	s.oomKills.end(c.ID, s.readOOMKills(c), exit.Reason == state.ReasonOOMKilled)
}

// readOOMKills returns the number of OOM kills in a container's cgroup. If the number is unknown,
// it returns 0. Then the metric misses kills, but nothing else depends on it.
func (s *meters) readOOMKills(c *container) uint64 {
	group, err := s.node.Cgroup(c.CgroupsPath)
	if err != nil {
		return 0
	}
	kills, err := group.OOMKills()
	if err != nil {
		s.unmeasured.Warn(s.log, "read the OOM kills of a container", "container", c.ID, "error", err)
	}
	return kills
}
