package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// warmUp is how many pods of each runtime are not counted.
const warmUp = 3

// result is what was measured of one runtime.
type result struct {
	times  []podTimes
	memory memory
}

// measureTimes fills results with times, one sample of each runtime in turn.
func measureTimes(ctx context.Context, runtimes []*runtime, samples int, results []result) error {
	for n := range samples + warmUp {
		for i, r := range runtimes {
			id, times, err := r.startPod(ctx)
			if id != "" {
				err = errors.Join(err, r.removePod(ctx, id))
			}
			if err != nil {
				return fmt.Errorf("%s, sample %d: %w", r.name, n+1, err)
			}
			if n >= warmUp {
				results[i].times = append(results[i].times, times)
			}
		}
	}
	return nil
}

// memory is PSS in bytes: of one pod's processes beside the container, on average,
// and of the daemon with all pods running.
type memory struct {
	pod, daemon float64
	kinds       map[string]float64 // of a pod, by the processes' name
}

// measureMemory starts the pods and compares what runs then with what ran before.
// Processes that a runtime always has, like those that wait to launch a container,
// are on both sides and cancel out.
func measureMemory(ctx context.Context, r *runtime, pods int) (m memory, err error) {
	before, err := settled(ctx, r)
	if err != nil {
		return m, err
	}
	for range pods {
		id, _, startErr := r.startPod(ctx)
		if id != "" {
			defer func() { err = errors.Join(err, r.removePod(ctx, id)) }()
		}
		if startErr != nil {
			return m, startErr
		}
	}
	after, err := settled(ctx, r)
	if err != nil {
		return m, err
	}
	m.kinds = map[string]float64{}
	for kind, pss := range after.kinds {
		m.kinds[kind] = (pss - before.kinds[kind]) / float64(pods)
		m.pod += m.kinds[kind]
	}
	m.daemon = after.daemon
	return m, nil
}

// settled takes a census when the runtime has come to rest: when two in a row are
// nearly the same.
func settled(ctx context.Context, r *runtime) (census, error) {
	last, err := takeCensus(r.daemon)
	for err == nil {
		select {
		case <-ctx.Done():
			return last, ctx.Err()
		case <-time.After(2 * time.Second):
		}
		var now census
		if now, err = takeCensus(r.daemon); err == nil && now.near(last) {
			return now, nil
		}
		last = now
	}
	return last, err
}

// census is the PSS of processes in bytes: the daemon, and all others by name but
// for the pods' containers and ourselves.
type census struct {
	daemon float64
	kinds  map[string]float64
}

func (c census) near(other census) bool {
	const tolerance = 64 << 10
	sum := func(c census) (total float64) {
		for _, pss := range c.kinds {
			total += pss
		}
		return total + c.daemon
	}
	diff := sum(c) - sum(other)
	return diff < tolerance && diff > -tolerance
}

func takeCensus(daemon int) (census, error) {
	c := census{kinds: map[string]float64{}}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return c, err
	}
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(cmdline) == 0 || strings.Contains(string(cmdline), sleepTime) {
			continue // ended, a kernel thread, or a container
		}
		pss, err := pssOf(dir)
		if err != nil {
			continue // ended meanwhile
		}
		if pid == daemon {
			c.daemon = pss
			continue
		}
		name, _, _ := strings.Cut(string(cmdline), "\x00")
		c.kinds[filepath.Base(name)] += pss
	}
	if c.daemon == 0 {
		return c, fmt.Errorf("the daemon, process %d, is gone", daemon)
	}
	return c, nil
}

// pssOf reads the Pss line of smaps_rollup.
func pssOf(dir string) (float64, error) {
	rollup, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(rollup)) {
		if value, ok := strings.CutPrefix(line, "Pss:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
			return kib * 1024, err
		}
	}
	return 0, fmt.Errorf("%s/smaps_rollup has no Pss", dir)
}

func printTable(w io.Writer, runtimes []*runtime, results []result, o options) {
	fmt.Fprintf(w, "%d CPUs, Linux %s, %s; %d samples, %d pods\n\n", goruntime.NumCPU(), kernel(), cgroups(), o.samples, o.pods)
	fmt.Fprintln(w, "| Runtime | Pod start p50 | p99 | RunPodSandbox p50 | CreateContainer p50 | StartContainer p50 | Memory per pod | Daemon |")
	fmt.Fprintln(w, "|---|---:|---:|---:|---:|---:|---:|---:|")
	for i, r := range runtimes {
		t, m := results[i].times, results[i].memory
		fmt.Fprintf(w, "| %s %s | %s | %s | %s | %s | %s | %s | %s |\n", r.name, r.version,
			milliseconds(t, podTimes.total, 50), milliseconds(t, podTimes.total, 99),
			milliseconds(t, func(t podTimes) time.Duration { return t.sandbox }, 50),
			milliseconds(t, func(t podTimes) time.Duration { return t.create }, 50),
			milliseconds(t, func(t podTimes) time.Duration { return t.start }, 50),
			mebibytes(m.pod), mebibytes(m.daemon))
	}
	fmt.Fprintln(w, "\nMemory per pod, by process:")
	for i, r := range runtimes {
		kinds := results[i].memory.kinds
		names := make([]string, 0, len(kinds))
		for name, pss := range kinds {
			if pss > 4096 { // less is noise: processes that have nothing to do with it
				names = append(names, fmt.Sprintf("%s %s", name, mebibytes(pss)))
			}
		}
		slices.Sort(names)
		fmt.Fprintf(w, "- %s: %s\n", r.name, strings.Join(names, ", "))
	}
}

// milliseconds returns a percentile of one of the times, by the nearest-rank method.
func milliseconds(times []podTimes, of func(podTimes) time.Duration, percent int) string {
	all := make([]time.Duration, 0, len(times))
	for _, t := range times {
		all = append(all, of(t))
	}
	slices.Sort(all)
	rank := (len(all)*percent + 99) / 100
	return fmt.Sprintf("%.1f ms", float64(all[rank-1].Microseconds())/1000)
}

func mebibytes(bytes float64) string { return fmt.Sprintf("%.2f MiB", bytes/(1<<20)) }

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func cgroups() string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return "cgroup v2"
	}
	return "cgroup v1"
}
