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

var against = flag.String("against", "", "other berth-shims for BenchmarkCompare, separated by commas")

// BenchmarkCompare compares the berth-shim of -shim with others. It starts pods with one after the
// other, so that the load of a busy machine is the same for all. It reports medians for each pod,
// and the median of the quotients with the first program's CPU time. "eight" starts eight pods at a
// time.
func BenchmarkCompare(b *testing.B) {
	b.Run("pod", func(b *testing.B) { benchCompare(b, 1, usual) })
	b.Run("seccomp", func(b *testing.B) { benchCompare(b, 1, usual, filtered) })
	b.Run("eight", func(b *testing.B) { benchCompare(b, 8, usual) })
}

func benchCompare(b *testing.B, atOnce int, change ...func(*proto.Launch)) {
	if *against == "" {
		b.Skip("needs -against")
	}
	pools := []*env{newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 2 })}
	for path := range strings.SplitSeq(*against, ",") {
		pools = append(pools, pools[0].withShim(b, path))
	}
	measured := make([]podSamples, len(pools))
	b.ResetTimer()
	for i := range b.N {
		for j := range pools {
			at := (i + j) % len(pools)
			measured[at].add(pools[at].usageOfPods(b, fmt.Sprintf("%d-%d", at, i), atOnce, change...))
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

// podSamples are the measurements of one program: CPU time and start in milliseconds, and faults.
type podSamples struct{ cpu, faults, start []float64 }

func (s *podSamples) add(used usage, start time.Duration) {
	s.cpu = append(s.cpu, used.programs.Seconds()*1000)
	s.faults = append(s.faults, float64(used.faults))
	s.start = append(s.start, start.Seconds()*1000)
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
	b.Cleanup(func() {
		if err := other.Launchers.Close(); err != nil {
			b.Error(err)
		}
	})
	return &other
}

// usageOfPods starts pods at once. It returns what their programs use in their whole lives, and the
// time until all have started.
func (e *env) usageOfPods(b *testing.B, id string, n int, change ...func(*proto.Launch)) (usage, time.Duration) {
	b.Helper()
	requests := make([][2]*proto.Launch, n) // pause, container
	for i := range requests {
		requests[i] = [...]*proto.Launch{e.pauseRequest(fmt.Sprintf("pause-%s-%d", id, i)), e.request(fmt.Sprintf("pod-%s-x%d", id, i), "")}
		for _, c := range change {
			c(requests[i][1])
		}
	}
	e.awaitLaunchers()
	before, begin := usageOf(b), time.Now()
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
	after := usageOf(b)
	return usage{programs: after.programs - before.programs, faults: after.faults - before.faults}, took
}

func median(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}
