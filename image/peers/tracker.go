package peers

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	// holderTime is how long a home node remembers a holder. Holders announce their layers again in
	// announcePeriod.
	holderTime = 2 * announcePeriod
	// leaseTime is how long a node may fetch a layer from the registry before another node may. The
	// lease ends earlier if the node says so, or if another node reports that the layer is not
	// there.
	leaseTime = 15 * time.Minute
	// maxTracked is the number of layers that a home node remembers. A layer with the maximum of
	// holders takes about 2 KB, so all layers take at most 100 MB.
	maxTracked = 50_000
	// maxHolders is the number of holders of a layer that a home node remembers.
	maxHolders = 16
	// maxOffered is the number of holders in an answer.
	maxOffered = 4
)

// found is a home node's answer about a layer.
type found struct {
	Holders  []string `json:"holders,omitempty"`  // addresses of nodes with the layer
	Fetching string   `json:"fetching,omitempty"` // address of the node that fetches it from the registry
	Fetch    bool     `json:"fetch,omitempty"`    // the asking node must fetch the layer
}

// tracker is what a home node knows about layers. Safe for concurrent use.
type tracker struct {
	now func() time.Time

	mu sync.Mutex
	// +checklocks:mu
	layers map[Key]*tracked
}

// tracked is a layer at its home node.
type tracked struct {
	holders  map[string]time.Time // last announcement by address
	fetching identity             // the node with the lease; empty: none
	until    time.Time            // end of the lease
}

// identity identifies a node that asks a home node. A lease belongs to an address and a
// certificate. A holder of another certificate could name the same address, and nodes may share a
// certificate.
type identity struct {
	address     string
	certificate string // see certificateOf; empty: this node
}

func newTracker(now func() time.Time) *tracker {
	return &tracker{now: now, layers: map[Key]*tracked{}}
}

// offered returns some holders, and forgets expired ones. The caller holds the lock.
//
// +checklocks:t.mu
func (t *tracker) offered(l *tracked, asking string) (holders []string) {
	now := t.now()
	for address, at := range l.holders {
		switch {
		case now.Sub(at) > holderTime:
			delete(l.holders, address)
		case address != asking:
			holders = append(holders, address)
		}
	}
	slices.Sort(holders) // the order of a map is random, but not evenly distributed
	rand.Shuffle(len(holders), func(i, j int) { holders[i], holders[j] = holders[j], holders[i] })
	return holders[:min(len(holders), maxOffered)]
}

// find answers the node asking. gone has the addresses of nodes on which the asking node did not
// find the layer. If no node has or fetches the layer, the asking node gets the lease.
func (t *tracker) find(k Key, asking identity, gone []string) found {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.get(k)
	for _, address := range gone {
		delete(l.holders, address)
		if l.fetching.address == address {
			l.fetching = identity{}
		}
	}
	if holders := t.offered(l, asking.address); len(holders) > 0 {
		return found{Holders: holders}
	}
	now := t.now()
	if l.fetching != (identity{}) && l.fetching != asking && now.Before(l.until) {
		return found{Fetching: l.fetching.address}
	}
	l.fetching, l.until = asking, now.Add(leaseTime)
	return found{Fetch: true}
}

// note records what a node has announced.
func (t *tracker) note(a announcement, certificate string) {
	for _, k := range a.Keys {
		if a.Failed {
			t.release(k, identity{a.From, certificate})
		} else {
			t.hold(k, identity{a.From, certificate})
		}
	}
}

// hold records that a node has a layer.
func (t *tracker) hold(k Key, n identity) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.get(k)
	if _, known := l.holders[n.address]; !known && len(l.holders) >= maxHolders {
		for other := range l.holders { // any holder is replaced, because a new one has fewer receivers
			delete(l.holders, other)
			break
		}
	}
	l.holders[n.address] = t.now()
	if l.fetching == n {
		l.fetching = identity{}
	}
}

// release ends the lease of a node that could not fetch a layer.
func (t *tracker) release(k Key, n identity) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.layers[k]; l != nil && l.fetching == n {
		l.fetching = identity{}
		t.forgetIfEmpty(k, l)
	}
}

// sweep forgets expired holders and leases.
func (t *tracker) sweep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	for k, l := range t.layers {
		for address, at := range l.holders {
			if now.Sub(at) > holderTime {
				delete(l.holders, address)
			}
		}
		if !now.Before(l.until) {
			l.fetching = identity{}
		}
		t.forgetIfEmpty(k, l)
	}
}

// forgetIfEmpty forgets a layer that nobody has or fetches. The caller holds the lock.
//
// +checklocks:t.mu
func (t *tracker) forgetIfEmpty(k Key, l *tracked) {
	if len(l.holders) == 0 && l.fetching == (identity{}) {
		delete(t.layers, k)
	}
}

// get returns what is known about a layer. If there are too many layers, it forgets another one.
// The caller holds the lock.
//
// +checklocks:t.mu
func (t *tracker) get(k Key) *tracked {
	l := t.layers[k]
	if l != nil {
		return l
	}
	if len(t.layers) >= maxTracked {
		for other := range t.layers { // any
			delete(t.layers, other)
			break
		}
	}
	l = &tracked{holders: map[string]time.Time{}}
	t.layers[k] = l
	return l
}
