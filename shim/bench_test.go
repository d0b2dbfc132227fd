package shim

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/shim/proto"
	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Run the benchmarks with -shim=../bin/berth-shim: the test binary is a larger program.

var pauses = flag.Duration("pauses", 50*time.Millisecond, "time between launches of BenchmarkLaunch, in which launchers warm up")

// samples are the durations of a benchmark's operations. On a busy machine the CPU time is more
// reliable than their mean.
type samples struct {
	took   []time.Duration
	before usage
}

func newSamples(b *testing.B) *samples {
	s := &samples{before: usageOf(b)}
	b.ResetTimer()
	return s
}

func (s *samples) add(since time.Time) { s.took = append(s.took, time.Since(since)) }

func (s *samples) report(b *testing.B) {
	used := usageOf(b)
	perSample := func(n float64) float64 { return n / float64(len(s.took)) }
	slices.Sort(s.took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(s.took[0]), "min-ms")
	b.ReportMetric(ms(s.took[len(s.took)/2]), "p50-ms")
	b.ReportMetric(ms(s.took[len(s.took)*9/10]), "p90-ms")
	b.ReportMetric(ms(s.took[len(s.took)*95/100]), "p95-ms")
	b.ReportMetric(ms(s.took[len(s.took)*99/100]), "p99-ms")
	b.ReportMetric(perSample(ms(used.own+used.programs-s.before.own-s.before.programs)), "cpu-ms")
	b.ReportMetric(perSample(ms(used.programs-s.before.programs)), "programs-cpu-ms")
	b.ReportMetric(perSample(float64(used.faults-s.before.faults)), "programs-faults")
	b.ReportMetric(0, "ns/op")
}

// usage is what this process and its programs have used. The programs are the launchers and their
// children.
type usage struct {
	own, programs time.Duration // CPU time
	faults        int64         // minor page faults of the programs
}

// usageOf returns the usage of this process and of all processes that it has reaped. It is process
// 1 (see TestMain), so it reaps orphans, too.
func usageOf(b *testing.B) usage {
	b.Helper()
	var own, programs unix.Rusage
	err := errors.Join(unix.Getrusage(unix.RUSAGE_SELF, &own), unix.Getrusage(unix.RUSAGE_CHILDREN, &programs))
	if err != nil {
		b.Fatal(err)
	}
	cpu := func(u unix.Rusage) time.Duration { return time.Duration(u.Utime.Nano() + u.Stime.Nano()) }
	return usage{own: cpu(own), programs: cpu(programs), faults: programs.Minflt}
}

// usual adds mounts, capabilities and masked paths as kubelet does.
func usual(r *proto.Launch) {
	r.Spec.Process.Args = []string{"/bin/true"}
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID",
		"CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE"}
	r.Spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}
	r.Spec.Mounts = append(r.Spec.Mounts,
		specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"}},
		specs.Mount{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		specs.Mount{Destination: "/dev/shm", Type: "bind", Source: "/dev/shm", Options: []string{"rbind", "rprivate", "nosuid", "noexec", "nodev"}},
	)
	for _, name := range []string{"hosts", "hostname", "resolv.conf"} {
		r.Spec.Mounts = append(r.Spec.Mounts, specs.Mount{Destination: "/etc/" + name, Type: "bind", Source: "/etc/" + name,
			Options: []string{"rbind", "rprivate", "nosuid", "nodev", "noexec", "rw"}})
	}
	r.Spec.Linux.MaskedPaths = []string{"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"}
	r.Spec.Linux.ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}

// filtered gives a container of a benchmark the profile RuntimeDefault.
func filtered(r *proto.Launch) {
	profile, err := seccomp.GetDefaultProfile(r.Spec)
	if err != nil {
		panic(err) // the profile is built in
	}
	r.Spec.Linux.Seccomp = profile
}

// BenchmarkLaunch measures a launch from request to reply.
func BenchmarkLaunch(b *testing.B) {
	b.Run("warm", func(b *testing.B) { benchLaunch(b, newEnvFor(&testing.T{}, b)) })
	b.Run("expected", func(b *testing.B) {
		e := newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 2 }) // as by default
		benchLaunch(b, e, func() { e.Expect(); time.Sleep(25 * time.Millisecond) })
	})
	b.Run("cold", func(b *testing.B) { benchLaunch(b, newEnvFor(&testing.T{}, b, func(c *Config) { c.Warm = false })) })
}

func benchLaunch(b *testing.B, e *env, before ...func()) {
	s := newSamples(b)
	for i := range b.N {
		req := e.request(fmt.Sprintf("bench-%d", i), "")
		req.Spec.Process.Args = []string{"/bin/true"}
		e.awaitLaunchers()
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
		(&container{env: e, Launch: req, Started: started}).remove()
	}
	s.report(b)
}

func (e *env) awaitLaunchers() {
	for e.missing() > 0 {
		time.Sleep(time.Millisecond)
	}
}

// BenchmarkPod measures the launch of a pause and then a container. "rested" waits until all
// launchers are ready again. "busy" starts one pod after another. The CPU time covers a pod's whole
// life. "seccomp" uses the default profile. In "foreign" libcontainer makes the pause.
func BenchmarkPod(b *testing.B) {
	b.Run("rested", func(b *testing.B) { benchPod(b, (*env).awaitLaunchers, usual) })
	b.Run("busy", func(b *testing.B) { benchPod(b, func(*env) {}, usual) })
	b.Run("seccomp", func(b *testing.B) { benchPod(b, (*env).awaitLaunchers, usual, filtered) })
	b.Run("foreign", func(b *testing.B) {
		benchPod(b, (*env).awaitLaunchers, usual, foreign)
	})
}

// foreign makes libcontainer make the pod's pause.
func foreign(r *proto.Launch) { r.Pause = proto.ContainerPause }

func benchPod(b *testing.B, rest func(*env), change ...func(*proto.Launch)) {
	e := newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 2 })
	e.awaitLaunchers()
	s := newSamples(b)
	for i := range b.N {
		reqs := []*proto.Launch{e.pauseRequest(fmt.Sprintf("pause-%d", i)), e.request(fmt.Sprintf("bench-%d", i), "")}
		for _, c := range change {
			c(reqs[1])
		}
		if reqs[1].Pause != "" { // the change asks for another kind of pause
			reqs[0].Pause, reqs[1].Pause = reqs[1].Pause, ""
		}
		rest(e)
		begin := time.Now()
		var pod []*container
		for _, req := range reqs {
			started, err := e.Launch(b.Context(), req)
			if err != nil {
				b.Fatal(err)
			}
			pod = append(pod, &container{env: e, Launch: req, Started: started})
		}
		s.add(begin)
		pod[0].awaitOurs()
		for _, c := range pod {
			c.remove()
		}
	}
	s.report(b)
}

// BenchmarkExec measures an exec probe: start, wait, launcher back in the pool. "seccomp" is in a
// container with the default profile.
func BenchmarkExec(b *testing.B) {
	b.Run("plain", func(b *testing.B) { benchExec(b, usual) })
	b.Run("seccomp", func(b *testing.B) { benchExec(b, usual, filtered) })
}

func benchExec(b *testing.B, change ...func(*proto.Launch)) {
	e := newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 2 }) // as by default
	req := e.request("bench", "")
	for _, c := range change {
		c(req)
	}
	req.Spec.Process.Args = []string{"/bin/sleep", "1000"}
	started, err := e.Launch(b.Context(), req)
	if err != nil {
		b.Fatal(err)
	}
	defer (&container{env: e, Launch: req, Started: started}).remove()
	process := testProcess("true")
	process.Args = []string{"/bin/true"}
	process.Capabilities, process.NoNewPrivileges = req.Spec.Process.Capabilities, req.Spec.Process.NoNewPrivileges
	s := newSamples(b)
	before := e.launchersCPU()
	for i := range b.N {
		time.Sleep(*pauses) // as between probes
		begin := time.Now()
		x, err := e.Exec(b.Context(), &proto.Exec{ID: "bench", ExecID: itoa(i), Process: process})
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
	s.before.programs -= e.launchersCPU() - before
	s.report(b)
}

// launchersCPU is the CPU time of idle launchers and of the processes that they have reaped.
func (e *env) launchersCPU() (sum time.Duration) {
	for _, pid := range e.idlePIDs() {
		stat, err := os.ReadFile("/proc/" + itoa(pid) + "/stat")
		if err != nil {
			e.Fatal(err)
		}
		_, after, _ := strings.Cut(string(stat), ") ")
		for _, ticks := range strings.Fields(after)[11:15] { // utime, stime, cutime, cstime
			n, err := strconv.Atoi(ticks)
			if err != nil {
				e.Fatal(err)
			}
			sum += time.Duration(n) * time.Second / 100
		}
	}
	return sum
}

// BenchmarkMemory measures the proportional set size of a monitor and a pause. 50 of each run, so
// that pages that they share count once.
func BenchmarkMemory(b *testing.B) {
	const pods = 50
	e := newEnvFor(&testing.T{}, b, func(c *Config) { c.Idle = 4 })
	for range b.N {
		var monitors, pauses int
		var running []*container
		for i := range pods {
			for _, req := range []*proto.Launch{e.pauseRequest(fmt.Sprintf("pause-%d", i)), e.request(fmt.Sprintf("pod-%d", i), "echo hello; exec sleep 1000")} {
				started, err := e.Launch(b.Context(), req)
				if err != nil {
					b.Fatal(err)
				}
				running = append(running, &container{env: e, Launch: req, Started: started})
			}
		}
		for _, c := range running {
			if c.Pause != "" {
				c.awaitOurs()
				pauses += pss(b, c.InitPID)
				continue
			}
			if err := OpenMonitor(c.Dir).ReopenLog(b.Context()); err != nil {
				b.Fatal(err)
			}
			monitors += pss(b, c.MonitorPID)
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
