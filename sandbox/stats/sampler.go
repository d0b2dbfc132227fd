package stats

import (
	"cmp"
	"context"
	"encoding/json"
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

	"berth/internal/cgstats"
	"berth/internal/diskusage"
	"berth/sandbox/state"
)

// Sample is the result of sampling a container. It is immutable.
type Sample struct {
	At         time.Time
	Mountpoint string          // of the writable layer's filesystem
	Layer      diskusage.Usage // size of the writable layer

	Processes *Processes      // nil if the container did not run
	Usage     *cgstats.Sample // by the container's runtime; nil: unknown

	usedCPU string    // CPU time of the pod before sampling; empty: sample again
	seen    time.Time // when the files were counted; At is later if the pod has been idle since
	walks   walks
	partial bool // quickTimeout was exceeded, and the goroutine for slow layers continues
}

// SampleState holds the last sample of a container. The zero value has none.
type SampleState struct {
	last      atomic.Pointer[Sample]
	requested atomic.Bool // a client has read the last sample
	slow      atomic.Bool // the layer is left to the goroutine for slow layers
	due       time.Time   // time of the next sample if a client asks; owned by the sampling goroutine
}

// Target is the current state of a container to sample.
type Target struct {
	ID         string
	State      *SampleState
	Running    bool
	FinishedAt time.Time // zero: it has not ended

	Project uint32 // project ID of its writable layer; 0: none

	// Location of its processes. Init is 0 if no process is visible to the node.
	CgroupsPath string
	Init        int // PID

	// Usage asks the runtime for a cgstats.Sample in JSON of a running container whose processes
	// the node does not see. nil: the node sees them.
	Usage func(context.Context) ([]byte, error)
}

// SamplerConfig configures a Sampler.
type SamplerConfig struct {
	Node    state.Node
	Period  time.Duration                          // minimum time between samples of a requested container
	Targets iter.Seq[Target]                       // the current state of all containers
	Layers  string                                 // directory of the writable layers, each in ID/upper and ID/volumes
	Images  string                                 // directory of the images
	Begin   func(what, object string) (end func()) // reports a wait without a limit

	// Quota returns the usage of a writable layer's project. ok is false if it is unknown.
	Quota func(project uint32) (usage diskusage.Usage, ok bool, err error)
	Log   *slog.Logger
}

// Sampler samples containers in the background.
type Sampler struct {
	cfg        SamplerConfig
	wake       chan struct{}
	mountpoint string
	device     string                     // may be empty
	filesystem atomic.Pointer[Filesystem] // Used is not set

	quick, longest time.Duration // quickTimeout and walkTimeout, except in tests
}

// NewSampler returns a Sampler. It does no I/O.
func NewSampler(cfg SamplerConfig) *Sampler {
	return &Sampler{cfg: cfg, wake: make(chan struct{}, 1), quick: quickTimeout, longest: walkTimeout}
}

const (
	// restFactor is the ratio of rest to sampling time. Sampling takes a tenth of one core's time,
	// at the lowest priority.
	restFactor = 9
	// maxRest limits the rest. Prometheus drops values older than five minutes, so one container
	// that is very slow to sample must not stop the metrics of the others.
	maxRest = 2 * time.Minute
	// maxIdle limits the age of the filesystem's figures while no container is due.
	maxIdle = time.Minute
	// unaskedFactor lengthens the period of containers that no client asks for. kubelet asks
	// permanently.
	unaskedFactor = 30
	// maxFiles limits the open files that are counted per container.
	maxFiles = 100_000
)

// restAfter returns the rest after a sample that took this long.
func restAfter(took time.Duration) time.Duration { return min(restFactor*took, maxRest) }

// Wake makes the Sampler check for due containers now. Callers wake it after a start or an exit.
func (c *Sampler) Wake() {
	select {
	case c.wake <- struct{}{}:
	default: // a wake-up is pending
	}
}

// Last returns the last sample, nil before the first one, and requests a new one after the period.
func (c *Sampler) Last(l *SampleState) *Sample {
	if !l.requested.Swap(true) {
		c.Wake()
	}
	return l.last.Load()
}

// Run samples containers until ctx ends. Locate must have succeeded. Slow layers have a separate
// goroutine, so a container with millions of files does not delay the samples of others.
func (c *Sampler) Run(ctx context.Context) {
	var slow sync.WaitGroup
	slow.Go(func() { c.run(ctx, true) })
	c.run(ctx, false)
	slow.Wait()
}

// run samples the slow layers or all others. It locks its thread, which ends with the goroutine,
// because an unprivileged thread cannot raise its priority again.
func (c *Sampler) run(ctx context.Context, slow bool) {
	runtime.LockOSThread()
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 19); err != nil {
		c.cfg.Log.Warn("lower priority of sampling", "error", err)
	}
	wake := c.wake
	if slow {
		wake = nil // a layer becomes slow only after its first sample
	}
	for ctx.Err() == nil {
		if !slow {
			if err := c.measureFilesystem(); err != nil {
				c.cfg.Log.Warn("sample writable layers", "error", err)
			}
		}
		s, wait := c.next(slow)
		if s == nil {
			rest(ctx, wake, min(wait, maxIdle))
			continue
		}
		begin := time.Now()
		c.sampleNext(ctx, s)
		rest(ctx, nil, restAfter(time.Since(begin)))
	}
}

// sampleNext samples a container and sets the time and the goroutine of its next sample.
func (c *Sampler) sampleNext(ctx context.Context, s *Target) {
	begin := time.Now()
	s.State.requested.Store(false) // later requests are for the next sample
	if err := c.sample(ctx, s); err != nil && ctx.Err() == nil {
		c.cfg.Log.Warn("sample container", "container", s.ID, "error", err)
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

// rest waits for d, or until it is woken.
func rest(ctx context.Context, wake <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-wake:
	case <-timer.C:
	}
}

// next returns the container that has been due for the longest time, among the slow or among the
// other containers. If no container is due, it returns nil and the time until the next one is due.
func (c *Sampler) next(slow bool) (*Target, time.Duration) {
	var first *Target
	for s := range c.cfg.Targets {
		if s.State.slow.Load() == slow && s.needsSample() && (first == nil ||
			cmp.Or(c.dueOf(&s).Compare(c.dueOf(first)), cmp.Compare(s.ID, first.ID)) < 0) {
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

// dueOf returns the time of a container's next sample, which is earlier for a requested container.
func (c *Sampler) dueOf(s *Target) time.Time {
	if s.State.due.IsZero() || s.State.requested.Load() {
		return s.State.due
	}
	return s.State.due.Add((unaskedFactor - 1) * c.cfg.Period)
}

// needsSample reports whether a container may have changed since its last sample.
func (s *Target) needsSample() bool {
	counted := s.State.last.Load()
	return counted == nil || counted.partial || s.Running || counted.Processes != nil || s.FinishedAt.After(counted.At)
}

// sample measures the writable layer of a container and, if it runs, its open files.
func (c *Sampler) sample(ctx context.Context, s *Target) error {
	defer c.cfg.Begin("size of writable layer", "container "+s.ID)()
	used, err := usedCPU(s, c.cfg.Node) // CPU time used after this requires another sample
	if err != nil {
		return err
	}
	if same := s.State.idleSince(used, time.Now()); same != nil {
		s.State.last.Store(same)
		return nil
	}
	upper, err := os.Open(filepath.Join(c.cfg.Layers, s.ID, "upper"))
	if os.IsNotExist(err) { // removed since the call of Targets
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
		counted.Processes, err = countProcesses(ctx, c.cfg.Node, s.CgroupsPath, s.Init)
	}
	if s.Usage != nil {
		counted.Usage, err = askRuntime(ctx, s)
	}
	if err != nil {
		counted.usedCPU = ""
	}
	s.State.last.Store(counted)
	return err
}

// usageTimeout limits how long a runtime may take to tell the usage of a container. One that hangs
// must not delay the samples of other containers much.
const usageTimeout = 2 * time.Second

// askRuntime returns the usage of a container whose processes the node does not see.
func askRuntime(ctx context.Context, s *Target) (*cgstats.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	used, err := s.Usage(ctx)
	if err != nil {
		return nil, fmt.Errorf("usage of the container: %w", err)
	}
	var u cgstats.Sample
	if err := json.Unmarshal(used, &u); err != nil {
		return nil, fmt.Errorf("usage of the container: %w", err)
	}
	return &u, nil
}
