package cni

import (
	"slices"
	"time"

	"github.com/containernetworking/cni/libcni"

	"berth/cni/berthnet"
)

// sight is what a look for obstacles has found.
type sight struct {
	net       *network
	ranges    *[][]IPRange // that it is about
	obstacles []berthnet.Obstacle
	err       error
}

// look looks for what is in the way of pods, of a network that is ready, where the last look is old or was about other addresses. It is done in a goroutine of
// its own, one at a time, for there may be very many rules and routes: nobody waits for it, least of all who asks for the STATUS.
func (o *owner) look() {
	v, ranges := o.n.view.Load(), o.n.ranges.Load()
	if o.looking || v.net == nil || !v.judged || v.verdict != nil || time.Since(v.obstaclesAt) <= maxObstaclesAge && v.obstaclesOf == ranges {
		return
	}
	o.looking = true
	o.n.done.Go(func() {
		s := sight{net: v.net, ranges: ranges}
		s.obstacles, s.err = obstacles(v.net.list, ranges)
		select {
		case o.sights <- s:
		case <-o.ctx.Done():
		}
	})
}

// see publishes what a look has found, unless it is about another network or other addresses than there are now: then there is another look. Of one that fails
// what was known stays, if it is about the same addresses, and the next comes when it would have come after a success.
func (o *owner) see(s sight) {
	o.looking = false
	old := o.n.view.Load()
	if s.net != old.net || s.ranges != o.n.ranges.Load() {
		o.look()
		return
	}
	now := *old
	now.obstaclesAt, now.obstaclesOf = time.Now(), s.ranges
	switch {
	case s.err == nil:
		now.obstacles = s.obstacles
		o.logObstacles(old.obstacles, now.obstacles)
	case s.ranges != old.obstaclesOf:
		now.obstacles = nil // those that are known are about other addresses
	}
	o.logLook(s)
	o.n.view.Store(&now)
}

// logLook logs what a look fails with, once.
func (o *owner) logLook(s sight) {
	said := o.lookErr
	if o.lookErr = ""; s.err != nil {
		o.lookErr = s.err.Error()
	}
	if s.err != nil && o.lookErr != said {
		o.n.log.Warn("what is in the way of pods of berth-net can't be found out", "network", s.net.list.Name, "error", s.err)
	}
}

func (o *owner) logObstacles(old, now []berthnet.Obstacle) {
	for _, one := range now {
		if !slices.Contains(old, one) {
			o.n.log.Warn("pods of berth-net may not reach everybody, nor be reached", "obstacle", one.What, "mend", one.Mend)
		}
	}
	if len(now) == 0 && len(old) > 0 {
		o.n.log.Info("nothing is in the way of pods of berth-net any more")
	}
}

// LookForObstacles finds what pods of the network would meet, as far as it is of berth-net, with the addresses that SetIPRanges has told.
func (n *Network) LookForObstacles() ([]berthnet.Obstacle, error) {
	v := n.view.Load()
	if v.net == nil {
		return nil, v.loadErr
	}
	return obstacles(v.net.list, n.ranges.Load())
}

func obstacles(list *libcni.NetworkConfigList, ranges *[][]IPRange) (all []berthnet.Obstacle, err error) {
	for _, own := range ownNetworks(list, ranges) {
		found, err := berthnet.Obstacles(own)
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}
