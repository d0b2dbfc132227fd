package shim

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"berth/shim/proto"
)

var against = flag.String("against", "", "other berth-shims for BenchmarkCompare, separated by commas")

// BenchmarkCompare compares the berth-shim of -shim with others. It starts pods with one after the
// other, so that the load of a busy machine is the same for all. It reports medians for each pod, and
// the median of the quotients with the first program's CPU time.
func BenchmarkCompare(b *testing.B) {
	b.Run("pod", func(b *testing.B) { benchCompare(b, usual) })
	b.Run("seccomp", func(b *testing.B) { benchCompare(b, usual, filtered) })
}

func benchCompare(b *testing.B, change ...func(*proto.Launch)) {
	if *against == "" {
		b.Skip("needs -against")
	}
	pools := []*env{newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 2 })}
	for path := range strings.SplitSeq(*against, ",") {
		pools = append(pools, pools[0].withShim(b, path))
	}
	cpu, quotients, faults := make([][]float64, len(pools)), make([][]float64, len(pools)), make([][]float64, len(pools))
	b.ResetTimer()
	for i := range b.N {
		for j := range pools {
			at := (i + j) % len(pools)
			used := pools[at].usageOfPod(b, fmt.Sprintf("%d-%d", at, i), change...)
			cpu[at] = append(cpu[at], used.programs.Seconds()*1000)
			faults[at] = append(faults[at], float64(used.faults))
		}
		for at := range pools {
			quotients[at] = append(quotients[at], cpu[at][i]/cpu[0][i])
		}
	}
	for at := range pools {
		b.ReportMetric(median(cpu[at]), fmt.Sprintf("cpu-ms-%d", at+1))
		b.ReportMetric(median(faults[at]), fmt.Sprintf("faults-%d", at+1))
		b.ReportMetric(median(quotients[at]), fmt.Sprintf("quotient-%d", at+1))
	}
	b.ReportMetric(0, "ns/op")
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

// usageOfPod returns what the programs of a pod use in its whole life.
func (e *env) usageOfPod(b *testing.B, id string, change ...func(*proto.Launch)) usage {
	b.Helper()
	pause, request := e.pauseRequest("pause-"+id), e.request("pod-"+id, "")
	for _, c := range change {
		c(request)
	}
	e.awaitLaunchers()
	before := usageOf(b)
	var pod []*container
	for _, req := range []*proto.Launch{pause, request} {
		started, err := e.Launch(b.Context(), req)
		if err != nil {
			b.Fatal(err)
		}
		pod = append(pod, &container{env: e, Launch: req, Started: started})
	}
	pod[0].awaitOurs()
	for _, c := range pod {
		c.remove()
	}
	after := usageOf(b)
	return usage{programs: after.programs - before.programs, faults: after.faults - before.faults}
}

func median(values []float64) float64 {
	return slices.Sorted(slices.Values(values))[len(values)/2]
}
