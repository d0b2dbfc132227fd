package shim

import (
	"fmt"
	"os"
	"testing"
	"time"

	"berth/internal/pidfd"
)

// benchEnv is an env whose requests are made in advance.
func benchEnv(b *testing.B, change ...func(*Config)) *env {
	b.Helper()
	e := newEnvFor(&testing.T{}, b, change...)
	return e
}

// BenchmarkLaunch measures a launch from request to reply with a launcher that has
// had the time to warm up. Run it with -shim=../bin/berth-shim: the test binary is
// a larger program.
func BenchmarkLaunch(b *testing.B) {
	e := benchEnv(b)
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		req := e.request(fmt.Sprintf("bench-%d", i), "")
		req.Spec.Process.Args = []string{"/bin/true"}
		for e.missing() > 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(50 * time.Millisecond) // the launcher warms up after it was started
		b.StartTimer()
		started, err := e.Launch(b.Context(), req)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		(&container{env: e, LaunchRequest: req, Started: started}).remove()
		b.StartTimer()
	}
}

// BenchmarkLaunchCold is BenchmarkLaunch without a pool.
func BenchmarkLaunchCold(b *testing.B) {
	e := benchEnv(b, func(c *Config) { c.Warm = false })
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		req := e.request(fmt.Sprintf("bench-%d", i), "")
		req.Spec.Process.Args = []string{"/bin/true"}
		b.StartTimer()
		started, err := e.Launch(b.Context(), req)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		(&container{env: e, LaunchRequest: req, Started: started}).remove()
		b.StartTimer()
	}
}

// BenchmarkExec measures an exec probe: start, wait, launcher back in the pool.
func BenchmarkExec(b *testing.B) {
	e := benchEnv(b)
	req := e.request("bench", "exec sleep 1000")
	started, err := e.Launch(b.Context(), req)
	if err != nil {
		b.Fatal(err)
	}
	c := &container{env: e, LaunchRequest: req, Started: started}
	defer c.remove()
	for i := 0; b.Loop(); i++ {
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
	}
}

var _ = os.Args
var _ = pidfd.Wait
