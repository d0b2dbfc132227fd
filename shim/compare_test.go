package shim

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/shim/proto"
)

var (
	against = flag.String("against", "", "other berth-shims for BenchmarkCompare, separated by commas")
	once    = flag.Bool("once", false, "BenchmarkCompare also measures launchers that serve one launch")
)

// BenchmarkCompare compares the berth-shim of -shim with others. It starts pods with one after the
// other, so that the load of a busy machine is the same for all. It reports medians for each pod,
// and the median of the quotients with the first program's CPU time. "eight" starts eight pods at a
// time.
func BenchmarkCompare(b *testing.B) {
	b.Run("pod", func(b *testing.B) { benchCompare(b, 16, 1, usual) })
	b.Run("seccomp", func(b *testing.B) { benchCompare(b, 16, 1, usual, filtered) })
	b.Run("eight", func(b *testing.B) { benchCompare(b, 64, 8, usual) })
}

func benchCompare(b *testing.B, pods, atOnce int, change ...func(*proto.Launch)) {
	e := newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 2 })
	pools := []func(id string) podSample{func(id string) podSample {
		return e.measurePods(b, e.cfg.ShimPath, false, id, pods, atOnce, change...)
	}}
	for path := range strings.SplitSeq(*against, ",") {
		if path != "" {
			pools = append(pools, func(id string) podSample { return e.measurePods(b, path, false, id, pods, atOnce, change...) })
		}
	}
	if *once {
		pools = append(pools, func(id string) podSample {
			return e.measurePods(b, e.cfg.ShimPath, true, id, pods, atOnce, change...)
		})
	}
	if len(pools) == 1 {
		b.Skip("needs -against or -once")
	}
	measured := make([]podSamples, len(pools))
	b.ResetTimer()
	for i := range b.N {
		for j := range pools {
			at := (i + j) % len(pools)
			measured[at].add(pools[at](fmt.Sprintf("%d-%d", at, i)))
		}
	}
	for at, m := range measured {
		var quotients []float64
		for i, cpu := range m.cpu {
			quotients = append(quotients, cpu/measured[0].cpu[i])
		}
		b.ReportMetric(median(m.cpu), fmt.Sprintf("cpu-ms-%d", at+1))
		b.ReportMetric(median(m.faults), fmt.Sprintf("faults-%d", at+1))
		b.ReportMetric(median(m.start), fmt.Sprintf("start-ms-%d", at+1))
		b.ReportMetric(median(quotients), fmt.Sprintf("quotient-%d", at+1))
	}
	b.ReportMetric(0, "ns/op")
}

// podSample is what one pod takes: CPU time and start in milliseconds, and faults.
type podSample struct{ cpu, faults, start float64 }

// measurePods starts pods with a pool of its own, whose launchers have ended when it returns. So
// their CPU time counts, divided by the number of pods.
func (e *env) measurePods(b *testing.B, path string, once bool, id string, pods, atOnce int,
	change ...func(*proto.Launch)) podSample {
	b.Helper()
	before := usageOf(b)
	pool := e.withShim(b, path)
	pool.keepsStatus = pool.keepsStatus && !once
	var start time.Duration
	for i := 0; i < pods; i += atOnce {
		start += pool.startPods(b, fmt.Sprintf("%s-%d", id, i), atOnce, change...)
	}
	if err := pool.Launchers.Close(); err != nil {
		b.Fatal(err)
	}
	reapOrphans()
	after := usageOf(b)
	n := float64(pods)
	return podSample{
		cpu:    (after.programs - before.programs).Seconds() * 1000 / n,
		faults: float64(after.faults-before.faults) / n,
		start:  start.Seconds() * 1000 / (n / float64(atOnce)),
	}
}

// podSamples are the measurements of one program.
type podSamples struct{ cpu, faults, start []float64 }

func (s *podSamples) add(one podSample) {
	s.cpu = append(s.cpu, one.cpu)
	s.faults = append(s.faults, one.faults)
	s.start = append(s.start, one.start)
}

// withShim returns the environment with a pool of another berth-shim.
func (e *env) withShim(b *testing.B, path string) *env {
	b.Helper()
	other := *e
	other.cfg.ShimPath = path
	var err error
	if other.Launchers, err = New(other.cfg); err != nil {
		b.Fatal(err)
	}
	return &other
}

// startPods starts pods at once, and ends them. It returns the time until all have started.
func (e *env) startPods(b *testing.B, id string, n int, change ...func(*proto.Launch)) time.Duration {
	b.Helper()
	requests := make([][2]*proto.Launch, n) // pause, container
	for i := range requests {
		requests[i] = [...]*proto.Launch{e.pauseRequest(fmt.Sprintf("pause-%s-%d", id, i)), e.request(fmt.Sprintf("pod-%s-x%d", id, i), "")}
		for _, c := range change {
			c(requests[i][1])
		}
	}
	e.awaitLaunchers()
	begin := time.Now()
	pods := make([][2]*container, n)
	var starting sync.WaitGroup
	for i := range requests {
		starting.Go(func() {
			for j, req := range requests[i] {
				started, err := e.Launch(b.Context(), req)
				if err != nil {
					b.Error(err)
					return
				}
				pods[i][j] = &container{env: e, Launch: req, Started: started}
			}
		})
	}
	starting.Wait()
	took := time.Since(begin)
	if b.Failed() {
		b.FailNow()
	}
	for _, pod := range pods {
		pod[0].awaitOurs()
		pod[0].remove()
		pod[1].remove()
	}
	return took
}

func median(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}
