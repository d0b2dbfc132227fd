// Package governor limits how fast image pulls receive bytes, so that pulls do not starve pods.
//
// # Contract
//
// All pulls share one limit: the configured bandwidth. The limit shrinks while pods wait longer for
// the disk or for memory than before the pulls, and grows again afterwards. It never falls below
// Slowest, because slower transfers would count as stalled.
//
// Pods may also wait for reasons of their own. If they still wait after settleTime at the lowest
// limit, pulls are not the cause. Then this level counts as normal, and the limit grows.
//
// The package starts no goroutine. Readers call Wait for the bytes that they have read, and one of
// them looks at the pressure once a second.
package governor

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

const (
	// Slowest is the lowest limit, in bytes a second. Slower transfers would count as stalled
	// (registry.DefaultStallTimeout).
	Slowest = 1 << 20
	// burst is the number of bytes that may pass at once.
	burst = 256 << 10
	// period is the time between two readings of the pressure.
	period = time.Second
	// settleTime is how long the lowest limit must have had no effect before the pressure counts as
	// normal.
	settleTime = 10 * time.Second
	// recovery is the growth of the limit in a period without pressure.
	recovery = 1.5
	// enough is a factor: the limit is lifted when it is this many times the rate before the limit
	// shrank.
	enough = 4
)

// Pressure describes how long processes of pods have waited for a resource. The kernel calls it PSI
// (Documentation/accounting/psi.rst), line "some".
type Pressure struct {
	Waited time.Duration // in total, since the cgroup exists
	Recent float64       // share of the last ten seconds, 0 to 1
}

// Config configures a Governor.
type Config struct {
	Bandwidth int64 // bytes a second of all pulls together; 0: no limit
	// Rise is the additional share of time that pods may wait during pulls, 0 to 1. 0: the pressure
	// is ignored.
	Rise float64
	// Pressure returns the pressure of pods by resource. It may read files. nil or an empty result:
	// unknown, so only Bandwidth counts.
	Pressure func() map[string]Pressure
	// Changed, if not nil, is called when the limit changes, with bytes a second; 0: no limit.
	Changed func(limit int64)
	Now     func() time.Time // nil: time.Now
}

// Governor is the limit of all pulls. Its methods may be called concurrently.
type Governor struct {
	cfg     Config
	most    rate.Limit
	limiter *rate.Limiter
	passed  atomic.Int64 // bytes
	looking atomic.Bool  // a reader looks at the pressure

	mu sync.Mutex
	// +checklocks:mu
	active int // pulls
	// +checklocks:mu
	ended time.Time // of the last pull
	// +checklocks:mu
	last look
	// +checklocks:mu
	normal float64 // share of time that pods wait without pulls
	// +checklocks:mu
	before float64 // bytes a second before the limit shrank; 0: it has not
	// +checklocks:mu
	lowest time.Time // when the limit fell to Slowest; zero: it is higher
}

// look is one reading of the pressure.
type look struct {
	at       time.Time
	passed   int64
	pressure map[string]Pressure
}

// New returns a Governor.
func New(cfg Config) *Governor {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Changed == nil {
		cfg.Changed = func(int64) {}
	}
	g := &Governor{cfg: cfg, most: rate.Inf}
	if cfg.Bandwidth > 0 {
		g.most = rate.Limit(max(cfg.Bandwidth, Slowest))
	}
	g.limiter = rate.NewLimiter(g.most, burst)
	return g
}

// Begin says that a pull begins. The caller calls end once, when the pull has ended.
func (g *Governor) Begin() (end func()) {
	now := g.look()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.active++; g.active == 1 {
		// The averages of ten seconds still contain a pull that ended just now.
		if now.at.Sub(g.ended) >= settleTime {
			g.normal = recent(now.pressure)
		}
		g.last = now
	}
	return g.end
}

func (g *Governor) end() {
	now := g.cfg.Now()
	g.mu.Lock()
	g.active--
	lift := g.active == 0 && g.before > 0
	if g.active == 0 {
		g.ended = now
	}
	if lift {
		g.set(g.most)
	}
	g.mu.Unlock()
	if lift {
		g.cfg.Changed(g.Limit())
	}
}

// Wait counts n bytes that a pull has received, and waits until it may receive more. It returns the
// time that it waited. The error comes from ctx.
func (g *Governor) Wait(ctx context.Context, n int) (waited time.Duration, err error) {
	g.passed.Add(int64(n))
	g.adapt()
	for n > 0 {
		some := min(n, burst)
		n -= some
		reserved := g.limiter.ReserveN(g.cfg.Now(), some)
		delay := reserved.DelayFrom(g.cfg.Now())
		if delay <= 0 {
			continue
		}
		waited += delay
		if err := sleep(ctx, delay); err != nil {
			reserved.CancelAt(g.cfg.Now()) // other pulls use it
			return waited, fmt.Errorf("wait for the bandwidth of pulls: %w", err)
		}
	}
	return waited, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Limit returns the current limit in bytes a second; 0: none.
func (g *Governor) Limit() int64 {
	if limit := g.limiter.Limit(); limit != rate.Inf {
		return int64(limit)
	}
	return 0
}

// adapt changes the limit if a period has passed since the last reading of the pressure. It does
// nothing while another reader does this.
func (g *Governor) adapt() {
	if g.cfg.Rise <= 0 || g.cfg.Pressure == nil || !g.looking.CompareAndSwap(false, true) {
		return
	}
	defer g.looking.Store(false)
	g.mu.Lock()
	due := g.active > 0 && g.cfg.Now().Sub(g.last.at) >= period
	g.mu.Unlock()
	if !due {
		return
	}
	now := g.look() // reads files, so without the lock
	g.mu.Lock()
	old := g.limiter.Limit()
	g.judge(now)
	limit := g.limiter.Limit()
	g.mu.Unlock()
	if limit != old {
		g.cfg.Changed(g.Limit())
	}
}

// judge sets the limit for the next period. The caller holds the lock.
//
// +checklocks:g.mu
func (g *Governor) judge(now look) {
	seconds := now.at.Sub(g.last.at).Seconds()
	share := waitedShare(g.last.pressure, now.pressure, seconds)
	received := float64(now.passed-g.last.passed) / seconds
	g.last = now
	limit := float64(g.limiter.Limit())
	switch suffers := share > g.normal+g.cfg.Rise; {
	case suffers && limit > Slowest:
		if g.before == 0 {
			g.before = max(received, Slowest)
		}
		g.set(rate.Limit(max(Slowest, min(limit, received)/2)))
		if g.limiter.Limit() == Slowest {
			g.lowest = now.at
		}
	case suffers && now.at.Sub(g.lowest) < settleTime:
	case suffers:
		g.normal = share
		g.grow(limit)
	case g.before > 0:
		g.grow(limit)
	}
}

// grow raises a limit that has shrunk, and lifts it if it no longer matters. The caller holds the
// lock.
//
// +checklocks:g.mu
func (g *Governor) grow(limit float64) {
	if limit *= recovery; limit > enough*g.before || rate.Limit(limit) >= g.most {
		g.set(g.most)
		return
	}
	g.set(rate.Limit(limit))
}

// set sets the limit. The caller holds the lock.
//
// +checklocks:g.mu
func (g *Governor) set(limit rate.Limit) {
	if limit == g.most {
		g.before = 0
	}
	if limit > Slowest {
		g.lowest = time.Time{}
	}
	g.limiter.SetLimitAt(g.cfg.Now(), limit)
}

func (g *Governor) look() look {
	l := look{at: g.cfg.Now(), passed: g.passed.Load()}
	if g.cfg.Rise > 0 && g.cfg.Pressure != nil {
		l.pressure = g.cfg.Pressure()
	}
	return l
}

// recent returns the highest share of the last ten seconds.
func recent(pressure map[string]Pressure) (share float64) {
	for _, p := range pressure {
		share = max(share, p.Recent)
	}
	return share
}

// waitedShare returns the highest share of time between two readings. It ignores a resource that is
// missing in one of them.
func waitedShare(from, to map[string]Pressure, seconds float64) (share float64) {
	for name, now := range to {
		before, ok := from[name]
		if !ok || now.Waited < before.Waited {
			continue // a new cgroup with an old name counts from zero
		}
		share = max(share, (now.Waited-before.Waited).Seconds()/seconds)
	}
	return math.Min(share, 1)
}
