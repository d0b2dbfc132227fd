package shim

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Run the benchmarks with -shim=../bin/berth-shim: the test binary is a larger program.

var pauses = flag.Duration("pauses", 50*time.Millisecond, "time between launches of BenchmarkLaunch, in which launchers warm up")

// samples are the durations of a benchmark's operations. Their mean says little on
// a machine that has something else to do.
type samples []time.Duration

func (s *samples) add(since time.Time) { *s = append(*s, time.Since(since)) }

func (s samples) report(b *testing.B) {
	slices.Sort(s)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(s[0]), "min-ms")
	b.ReportMetric(ms(s[len(s)/2]), "p50-ms")
	b.ReportMetric(ms(s[len(s)*9/10]), "p90-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkLaunch measures a launch from request to reply.
func BenchmarkLaunch(b *testing.B) {
	b.Run("warm", func(b *testing.B) { benchLaunch(b, newEnvFor(&testing.T{}, b)) })
	b.Run("expected", func(b *testing.B) {
		e := newEnvFor(&testing.T{}, b)
		benchLaunch(b, e, func() { e.Expect(); time.Sleep(25 * time.Millisecond) })
	})
	b.Run("cold", func(b *testing.B) { benchLaunch(b, newEnvFor(&testing.T{}, b, func(c *Config) { c.Warm = false })) })
}

func benchLaunch(b *testing.B, e *env, before ...func()) {
	var s samples
	for i := range b.N {
		req := e.request(fmt.Sprintf("bench-%d", i), "")
		req.Spec.Process.Args = []string{"/bin/true"}
		for e.missing() > 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(*pauses)
		for _, f := range before {
			f()
		}
		begin := time.Now()
		started, err := e.Launch(b.Context(), req)
		s.add(begin)
		if err != nil {
			b.Fatal(err)
		}
		(&container{env: e, LaunchRequest: req, Started: started}).remove()
	}
	s.report(b)
}

// BenchmarkExec measures an exec probe: start, wait, launcher back in the pool.
func BenchmarkExec(b *testing.B) {
	e := newEnvFor(&testing.T{}, b)
	req := e.request("bench", "exec sleep 1000")
	started, err := e.Launch(b.Context(), req)
	if err != nil {
		b.Fatal(err)
	}
	defer (&container{env: e, LaunchRequest: req, Started: started}).remove()
	var s samples
	for i := range b.N {
		begin := time.Now()
		x, err := e.Exec(b.Context(), ExecRequest{ID: "bench", ExecID: itoa(i), Process: testProcess("true")})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := x.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
		if err := x.Close(); err != nil {
			b.Fatal(err)
		}
		s.add(begin)
	}
	s.report(b)
}

// BenchmarkMemory tells what a monitor and a pause cost when there are 50 of each:
// proportional set size, so that the program's pages count once.
func BenchmarkMemory(b *testing.B) {
	const pods = 50
	e := newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 4 })
	for range b.N {
		var monitors, pauses int
		var running []*container
		for i := range pods {
			for _, req := range []LaunchRequest{e.pauseRequest(fmt.Sprintf("pause-%d", i)), e.request(fmt.Sprintf("pod-%d", i), "echo hello; exec sleep 1000")} {
				started, err := e.Launch(b.Context(), req)
				if err != nil {
					b.Fatal(err)
				}
				running = append(running, &container{env: e, LaunchRequest: req, Started: started})
			}
		}
		for _, c := range running {
			if c.Pause {
				pauses += pss(b, c.InitPID)
				continue
			}
			if err := OpenMonitor(c.Dir).ReopenLog(b.Context()); err != nil {
				b.Fatal(err)
			}
			monitors += pss(b, c.ShimPID)
		}
		for _, c := range running {
			c.remove()
			if err := os.RemoveAll(c.Dir); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(monitors)/pods, "KiB/monitor")
		b.ReportMetric(float64(pauses)/pods, "KiB/pause")
		b.ReportMetric(0, "ns/op")
	}
}

// pss returns a process's proportional set size in KiB.
func pss(b *testing.B, pid int) int {
	b.Helper()
	data, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "smaps_rollup"))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		var kib int
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			return kib
		}
	}
	b.Fatalf("no Pss in %s", data)
	return 0
}
