package stats

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/diskusage"
)

// Sample is what was counted of a container, at some time. It never changes.
type Sample struct {
	At         time.Time
	Mountpoint string          // of the filesystem that holds the writable layer
	Layer      diskusage.Usage // the writable layer

	Processes *Processes // nil when the container did not run

	usedCPU string    // by the pod, before it was counted; empty: it is to be counted again
	seen    time.Time // when it was counted, where At is when it was found to have done nothing since
	walks   walks
	partial bool // the count was given up, and the goroutine for slow layers takes it over
}

// SampleState is what is known of one container. Its zero value is of one that was never counted.
type SampleState struct {
	last  atomic.Pointer[Sample]
	asked atomic.Bool // for the last count
	slow  atomic.Bool // the goroutine for slow layers counts it
	due   time.Time   // when it is to be counted again if somebody has asked; of the goroutine that counts it
}

// Target is a container as it is at the moment.
type Target struct {
	ID         string
	State      *SampleState
	Running    bool
	FinishedAt time.Time // zero: it has not ended

	Project uint32 // of its writable layer; 0: none

	// Where its processes are. Init is 0 if it has none, or none that the node can see.
	CgroupsPath string
	Init        int // process ID
}

// SamplerConfig says what is to be counted, and where it is.
type SamplerConfig struct {
	Period        time.Duration                          // between two counts of a container that somebody asks for, at least
	Targets       iter.Seq[Target]                       // all containers, as they are when it is called
	Layers        string                                 // the folder of all writable layers: ID/upper is one
	Images        string                                 // the folder of the images
	SystemdCgroup bool                                   // paths name scopes of systemd's
	Begin         func(what, object string) (end func()) // notes what is waited for, however long it takes

	// Quota returns what a writable layer's project takes. ok is false where that is not known.
	Quota func(project uint32) (usage diskusage.Usage, ok bool, err error)
	Log   *slog.Logger
}

// Sampler counts.
type Sampler struct {
	cfg        SamplerConfig
	wake       chan struct{}
	mountpoint string
	device     string                     // empty if it is not known
	filesystem atomic.Pointer[Filesystem] // without Used

	quick, longest time.Duration // quickLimit and walkLimit, but for tests
}

// NewSampler returns a counter. It touches nothing.
func NewSampler(cfg SamplerConfig) *Sampler {
	return &Sampler{cfg: cfg, wake: make(chan struct{}, 1), quick: quickLimit, longest: walkLimit}
}

const (
	// patience is how much longer than a count took nothing is counted after it: with it,
	// counting takes a tenth of one core's time, and that at the lowest priority.
	patience = 9
	// maxRest bounds that. Prometheus drops what is older than five minutes, so that one
	// container that is very slow to count must not silence the others.
	maxRest = 2 * time.Minute
	// maxIdle is the age that the filesystem's figures may have when nothing is to be counted.
	maxIdle = time.Minute
	// unasked is how many periods pass between two counts of a container that nobody asks for. kubelet asks all the time.
	unasked = 30
	// maxFiles is how many open files of a container are looked at.
	maxFiles = 100_000
)

// restAfter is for how long nothing is counted after a count that took so long.
func restAfter(took time.Duration) time.Duration { return min(patience*took, maxRest) }

// Soon has a container counted that started or ended.
func (c *Sampler) Soon() {
	select {
	case c.wake <- struct{}{}:
	default: // it is awake
	}
}

// Last returns what was counted last, nil before the first count, and has the container counted again when the period is over.
func (c *Sampler) Last(l *SampleState) *Sample {
	if !l.asked.Swap(true) {
		c.Soon()
	}
	return l.last.Load()
}

// Run counts containers until ctx ends, after Locate. Layers that take long to count have a
// goroutine of their own, so that a container with millions of files does not hide what its
// neighbours write.
func (c *Sampler) Run(ctx context.Context) {
	var slow sync.WaitGroup
	slow.Go(func() { c.run(ctx, true) })
	c.run(ctx, false)
	slow.Wait()
}

// run counts the slow layers, or the others. It has a thread of its own, which ends with its
// goroutine, because a low priority can't be taken back.
func (c *Sampler) run(ctx context.Context, slow bool) {
	runtime.LockOSThread()
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 19); err != nil {
		c.cfg.Log.Warn("count writable layers at a low priority", "error", err)
	}
	wake := c.wake
	if slow {
		wake = nil // no layer is slow before it was counted
	}
	for ctx.Err() == nil {
		if !slow {
			if err := c.measureFilesystem(); err != nil {
				c.cfg.Log.Warn("count writable layers", "error", err)
			}
		}
		s, wait := c.next(slow)
		if s == nil {
			rest(ctx, wake, min(wait, maxIdle))
			continue
		}
		begin := time.Now()
		c.countNext(ctx, s)
		rest(ctx, nil, restAfter(time.Since(begin)))
	}
}

// countNext counts a container, and decides when and by which goroutine it is counted next.
func (c *Sampler) countNext(ctx context.Context, s *Target) {
	begin := time.Now()
	s.State.asked.Store(false) // who asks from now on asks for the next count
	if err := c.count(ctx, s); err != nil && ctx.Err() == nil {
		c.cfg.Log.Warn("count the writable layer", "container", s.ID, "error", err)
	}
	s.State.due = time.Now().Add(c.cfg.Period)
	last := s.State.last.Load()
	switch {
	case last != nil && last.partial && !s.State.slow.Load():
		s.State.due = time.Time{}
		s.State.slow.Store(true)
	case time.Since(begin) < c.quick/2:
		s.State.slow.Store(false)
	}
}

// rest waits for so long, or until it is woken.
func rest(ctx context.Context, wake <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-wake:
	case <-timer.C:
	}
}

// next returns the container that waits longest, of those that are slow or of the others, or nil
// and after how long the next one is due.
func (c *Sampler) next(slow bool) (*Target, time.Duration) {
	var first *Target
	for s := range c.cfg.Targets {
		if s.State.slow.Load() == slow && s.needsCount() && (first == nil || cmp.Or(c.dueOf(&s).Compare(c.dueOf(first)), cmp.Compare(s.ID, first.ID)) < 0) {
			first = &s
		}
	}
	if first == nil {
		return nil, math.MaxInt64
	}
	if wait := time.Until(c.dueOf(first)); wait > 0 {
		return nil, wait
	}
	return first, 0
}

// dueOf is when a container is to be counted, earlier if somebody has asked.
func (c *Sampler) dueOf(s *Target) time.Time {
	if s.State.due.IsZero() || s.State.asked.Load() {
		return s.State.due
	}
	return s.State.due.Add((unasked - 1) * c.cfg.Period)
}

// needsCount is false for what can't have changed since it was counted.
func (s *Target) needsCount() bool {
	counted := s.State.last.Load()
	return counted == nil || counted.partial || s.Running || counted.Processes != nil || s.FinishedAt.After(counted.At)
}

// count counts what a container has written and, if it runs, has open.
func (c *Sampler) count(ctx context.Context, s *Target) error {
	defer c.cfg.Begin("the count of its writable layer", "container "+s.ID)()
	used, err := usedCPU(s, c.cfg.SystemdCgroup) // what runs from here on makes the next count necessary
	if err != nil {
		return err
	}
	if same := s.State.idleSince(used, time.Now()); same != nil {
		s.State.last.Store(same)
		return nil
	}
	upper, err := os.Open(filepath.Join(c.cfg.Layers, s.ID, "upper"))
	if os.IsNotExist(err) { // removed meanwhile
		return nil
	}
	if err != nil {
		return fmt.Errorf("open writable layer: %w", err)
	}
	defer upper.Close()
	now := time.Now()
	counted := &Sample{At: now, Mountpoint: c.mountpoint, usedCPU: used, seen: now}
	if err := c.measureLayer(ctx, s, upper, counted); err != nil {
		return err
	}
	if s.Init != 0 {
		counted.Processes, err = countProcesses(ctx, s.CgroupsPath, c.cfg.SystemdCgroup, s.Init)
	}
	if err != nil {
		counted.usedCPU = ""
	}
	s.State.last.Store(counted)
	return err
}
