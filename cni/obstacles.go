package cni

import (
	"slices"
	"time"
)

// search is the result of a search for obstacles.
type search struct {
	net       *network
	ranges    *[][]IPRange // the ranges that the search used
	obstacles []Obstacle
	err       error
}

// startSearch searches for obstacles in a goroutine, one at a time, because a node may have many
// rules and routes. It does nothing while the network is not ready, or while the last search is
// recent and used the same ranges.
func (o *owner) startSearch() {
	v, ranges := o.n.view.Load(), o.n.ranges.Load()
	recent := time.Since(v.obstaclesAt) <= maxObstaclesAge && v.obstaclesOf == ranges
	if o.searching || v.net == nil || !v.asked || v.statusErr != nil || recent {
		return
	}
	o.searching = true
	o.n.done.Go(func() {
		s := search{net: v.net, ranges: ranges}
		s.obstacles, s.err = o.n.cfg.Readers.obstacles(v.net.list, ranges)
		select {
		case o.searches <- s:
		case <-o.ctx.Done():
		}
	})
}

// endSearch publishes the result of a search, and starts another one if the network or the ranges
// have changed meanwhile. After a failure it keeps the obstacles of the same ranges. A failure does
// not change the time of the next search.
func (o *owner) endSearch(s search) {
	o.searching = false
	old := o.n.view.Load()
	if s.net != old.net || s.ranges != o.n.ranges.Load() {
		o.startSearch()
		return
	}
	now := *old
	now.obstaclesAt, now.obstaclesOf = time.Now(), s.ranges
	switch {
	case s.err == nil:
		now.obstacles = s.obstacles
		o.logObstacles(old.obstacles, now.obstacles)
	case s.ranges != old.obstaclesOf:
		now.obstacles = nil // the known obstacles belong to other addresses
	}
	o.logSearchError(s)
	o.n.view.Store(&now)
}

// logSearchError logs an error once, not after each search.
func (o *owner) logSearchError(s search) {
	logged := o.searchErr
	if o.searchErr = ""; s.err != nil {
		o.searchErr = s.err.Error()
	}
	if s.err != nil && o.searchErr != logged {
		o.n.log.Warn("search for obstacles of pods", "network", s.net.list.Name, "error", s.err)
	}
}

func (o *owner) logObstacles(old, now []Obstacle) {
	for _, one := range now {
		if !slices.Contains(old, one) {
			o.n.log.Warn("pods of the node's network may lack connections", "obstacle", one.Problem, "fix", one.Fix)
		}
	}
	if len(now) == 0 && len(old) > 0 {
		o.n.log.Info("the obstacles no longer exist")
	}
}

// Obstacles searches for settings of the node that restrict new pods of the network, with the
// ranges given to SetIPRanges.
func (n *Network) Obstacles() ([]Obstacle, error) {
	v := n.view.Load()
	if v.net == nil {
		return nil, v.loadErr
	}
	return n.cfg.Readers.obstacles(v.net.list, n.ranges.Load())
}
