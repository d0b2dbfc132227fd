package main

import (
	"context"
	"time"

	"berth/integration/bench/subject"
)

const (
	idlePods = 100
	// idleTime exceeds the longest period of any runtime's background work. berth counts files
	// every five minutes.
	idleTime = 6 * time.Minute
)

// idle measures a node with idle pods and no requests. All runtimes are idle at the same time,
// except while the pods of others start.
var idle = experiment{
	name: "100 pods, idle", rows: []string{"cpu-idle-100"}, applies: plugins, samples: once, limit: idleTime + 3*time.Minute,
	prepare: func(ctx context.Context, _ *bench, s *subject.Subject) (any, error) {
		err := inParallel(ctx, idlePods, func(ctx context.Context, _ int) error {
			_, _, err := s.Start(ctx, true)
			return err
		})
		if err != nil {
			return nil, err
		}
		// By then caches are filled, and freed memory has returned to the kernel.
		if _, err := s.SettledMemory(ctx); err != nil {
			return nil, err
		}
		used, err := s.CPU()
		return idleSince{time.Now(), used}, err
	},
	sample: func(ctx context.Context, c *contestant) (values, error) {
		since := c.state.(idleSince)
		if !c.s.AccountsCPU() {
			return nil, nil
		}
		if err := wait(ctx, time.Until(since.at.Add(idleTime))); err != nil {
			return nil, err
		}
		used, err := c.s.CPU()
		return values{"cpu-idle-100": {100 * float64(used-since.used) / float64(time.Since(since.at))}}, err
	},
}

// idleSince holds the time at which a runtime became idle, and its CPU time then.
type idleSince struct {
	at   time.Time
	used time.Duration
}

// wait waits for d. It returns at once if d is not positive.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// once is the number of samples of a slow experiment.
func once(int) int { return 1 }
