package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"
)

// paceStarts is how often measurePace starts a program. All starts together take about ten
// milliseconds.
const paceStarts = 10

// measurePace does a fixed piece of work, similar to a runtime's, and returns its duration in ms.
// On a shared machine the duration varies by a factor of two.
func measurePace(ctx context.Context) (took float64, err error) {
	begin := time.Now()
	for range paceStarts {
		if err := exec.CommandContext(ctx, "true").Run(); err != nil {
			return 0, fmt.Errorf("measure the machine's pace: %w", err)
		}
	}
	return ms(time.Since(begin)), nil
}

// quietPatience bounds all waits of a run for a quiet machine. quietPause is the pause between two
// measurements; it is short because the load changes within seconds. An idle processor is slow at
// first, so the best of quietTries counts.
const (
	quietPatience = time.Hour
	quietPause    = time.Second
	quietTries    = 3
)

// awaitQuiet waits until the machine is as fast as the option -quiet requires, or until
// quietPatience has passed.
func (b *bench) awaitQuiet(ctx context.Context) {
	for b.quiet > 0 && b.waited < quietPatience {
		began := time.Now()
		quiet, err := b.isQuiet(ctx)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err) // the samples fail with the same error
			return
		}
		if quiet {
			return
		}
		select {
		case <-time.After(quietPause):
			b.waited += time.Since(began)
		case <-ctx.Done():
			return
		}
	}
}

// isQuiet reports whether the machine is now as fast as the option -quiet requires.
func (b *bench) isQuiet(ctx context.Context) (bool, error) {
	for range quietTries {
		pace, err := measurePace(ctx)
		if err != nil || pace <= b.quiet {
			return err == nil, err
		}
	}
	return false, nil
}

// processors holds the processors' busy time since boot, in ticks, and the part of it that the
// hypervisor gave to other machines.
type processors struct{ busy, stolen float64 }

// readProcessors reads /proc/stat (proc_stat(5)).
func readProcessors() (processors, error) {
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		return processors{}, err
	}
	return parseProcessors(string(content))
}

func parseProcessors(stat string) (p processors, err error) {
	var user, nice, system, idle, iowait, irq, softirq float64
	if _, err := fmt.Sscanf(stat, "cpu %g %g %g %g %g %g %g %g", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &p.stolen); err != nil {
		return processors{}, fmt.Errorf("read the processors' times: %w", err)
	}
	p.busy = user + nice + system + irq + softirq
	return p, nil
}

// stolenSince returns the share of the requested processor time that the hypervisor gave to other
// machines.
func (p processors) stolenSince(then processors) float64 {
	busy, stolen := p.busy-then.busy, p.stolen-then.stolen
	if busy+stolen <= 0 {
		return 0
	}
	return stolen / (busy + stolen)
}
