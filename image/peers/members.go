package peers

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/internal/lograte"
	"berth/internal/task"
)

const (
	// resolvePeriod is the time between two resolutions of the seeds.
	resolvePeriod = 30 * time.Second
	// resolveTimeout limits the resolution of a seed.
	resolveTimeout = 10 * time.Second
	// maxResolving limits the seeds that are resolved at the same time.
	maxResolving = 16
	// maxMembers limits the addresses of all seeds.
	maxMembers = 10_000
	// banTime is the time for which a peer is not asked after it has sent wrong bytes.
	banTime = time.Hour
	// pauseTime is the time for which a peer is not asked after it did not answer.
	pauseTime = 10 * time.Second
)

// members are the addresses of all nodes, this one included. Safe for concurrent use.
type members struct {
	self     string
	seeds    []string
	resolve  func(ctx context.Context, host string) ([]string, error)
	log      *slog.Logger
	warnings lograte.Limiter
	noSelf   sync.Once     // warns once that the seeds lack self
	ready    chan struct{} // closed after the first resolution
	isReady  sync.Once

	mu sync.Mutex
	// +checklocks:mu
	known []string // sorted; self is among them
	// +checklocks:mu
	hosts map[string]bool // their IP addresses
	// +checklocks:mu
	avoided map[string]time.Time
}

func newMembers(self string, seeds []string, log *slog.Logger) *members {
	return &members{
		self: self, seeds: seeds, resolve: net.DefaultResolver.LookupHost, log: log,
		known: []string{self}, avoided: map[string]time.Time{}, ready: make(chan struct{}),
	}
}

// run resolves the seeds until ctx ends.
func (m *members) run(ctx context.Context) {
	tick := time.NewTicker(resolvePeriod)
	defer tick.Stop()
	for {
		m.refresh(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// refresh resolves all seeds, each within resolveTimeout. A seed that cannot be resolved keeps its
// last addresses, because all nodes must agree about the members.
func (m *members) refresh(ctx context.Context) {
	found := map[string]bool{}
	complete := true
	for i, r := range m.resolveAll(ctx) {
		if r.err != nil {
			complete = false
			m.warnings.Warn(m.log, "a seed of peers cannot be resolved", "seed", m.seeds[i], "error", r.err)
		}
		for _, a := range r.addresses {
			if len(found) < maxMembers {
				found[a] = true
			}
		}
	}
	if complete && len(m.seeds) > 0 && !found[m.self] {
		m.noSelf.Do(func() {
			m.log.Warn("peers.seeds do not contain peers.advertise: if those of other nodes do not either, they refuse this node",
				"advertise", m.self)
		})
	}
	found[m.self] = true
	m.mu.Lock()
	defer m.mu.Unlock()
	if !complete {
		for _, a := range m.known {
			found[a] = true
		}
	}
	m.known = slices.Sorted(maps.Keys(found))
	m.hosts = map[string]bool{}
	for _, a := range m.known {
		if host, _, err := net.SplitHostPort(a); err == nil {
			m.hosts[host] = true
		}
	}
	m.isReady.Do(func() { close(m.ready) })
}

// resolution is the result for one seed.
type resolution struct {
	addresses []string
	err       error
}

// resolveAll resolves the seeds at the same time, so that a hanging seed does not delay the others.
func (m *members) resolveAll(ctx context.Context) []resolution {
	results := make([]resolution, len(m.seeds))
	group := errgroup.Group{}
	group.SetLimit(maxResolving)
	for i, seed := range m.seeds {
		group.Go(func() error {
			results[i].err = task.Guard(m.log, "resolve", seed, func() (err error) {
				ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
				defer cancel()
				results[i].addresses, err = m.addressesOf(ctx, seed)
				return err
			})
			return nil
		})
	}
	_ = group.Wait() // results has the errors
	return results
}

// addressesOf returns the addresses of a seed in the form of netip.AddrPort.String, which is how
// members are compared.
func (m *members) addressesOf(ctx context.Context, seed string) ([]string, error) {
	host, text, err := net.SplitHostPort(seed)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("port of %s: %w", seed, err)
	}
	hosts, err := m.resolve(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("resolve %s: %w", host, err)
	}
	addresses := make([]string, 0, len(hosts))
	for _, h := range hosts {
		address, err := netip.ParseAddr(h)
		if err != nil {
			return nil, fmt.Errorf("resolve %s: %w", host, err)
		}
		addresses = append(addresses, netip.AddrPortFrom(address.Unmap(), uint16(port)).String())
	}
	return addresses, nil
}

// wait waits for the first resolution of the seeds. Until then each node would be its own home.
func (m *members) wait(ctx context.Context) {
	select {
	case <-m.ready:
	case <-ctx.Done():
	}
}

// all returns all members, sorted.
func (m *members) all() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.known
}

// has reports whether an address belongs to a member.
func (m *members) has(address string) bool {
	_, ok := slices.BinarySearch(m.all(), address)
	return ok
}

// hasHost reports whether a connection comes from the IP address of a member.
func (m *members) hasHost(from net.Addr) bool {
	tcp, ok := from.(*net.TCPAddr)
	if !ok {
		return false
	}
	host := tcp.AddrPort().Addr().Unmap().WithZone("").String()
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hosts[host]
}

// avoid keeps a member from being asked for a while. It does not shorten a longer pause.
func (m *members) avoid(address string, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if until := time.Now().Add(d); until.After(m.avoided[address]) {
		m.avoided[address] = until
	}
}

// usable reports whether a member may be asked.
func (m *members) usable(address string) bool {
	if !m.has(address) {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	until, avoided := m.avoided[address]
	if avoided && time.Now().After(until) {
		delete(m.avoided, address)
		avoided = false
	}
	return !avoided
}
