package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/integration/bench/subject"
	"berth/integration/fixture"
)

// values holds the results of one sample, by row.
type values map[string][]float64

// experiment measures one row or several.
type experiment struct {
	name string
	rows []string
	// applies reports whether a runtime takes part.
	applies func(*subject.Subject) bool
	warmUp  int
	samples func(wanted int) int
	// oneByOne prepares one runtime at a time, because the preparation is large.
	oneByOne bool
	// limit bounds a sample or the preparation, budget all samples of a runtime.
	limit, budget time.Duration

	prepare func(context.Context, *bench, *subject.Subject) (any, error)
	sample  func(context.Context, *contestant) (values, error)
}

var experiments = []experiment{
	lifecycle("host", plugins), lifecycle("cni", plugins), lifecycle("own", builtInNetwork),
	timelines("host", plugins), timelines("cni", plugins), timelines("own", builtInNetwork),
	calls,
	memory,
	burst("host", plugins), burst("cni", plugins), burst("own", builtInNetwork),
	pull("gzip", fixture.Gzip), pull("zstd", fixture.Zstd),
	fleet,
	idle,
	throughKubelet,
}

func plugins(s *subject.Subject) bool        { return !s.BuiltInNetwork }
func builtInNetwork(s *subject.Subject) bool { return s.BuiltInNetwork }

func wanted(n int) int { return n }

// lifecycle runs one pod after another on one kind of network. It measures the duration of each
// call and the CPU time of the pod's life, including the runtime's work between pods.
func lifecycle(network string, applies func(*subject.Subject) bool) experiment {
	rows := []string{"start-" + network, "cpu-" + network, "instructions-" + network, "stop-sandbox-" + network}
	if network == "host" {
		rows = append(rows, "stop-container")
	}
	return experiment{
		name: "one pod after another, " + network, rows: rows, applies: applies, warmUp: 3, samples: wanted, limit: time.Minute, budget: 2 * time.Minute,
		sample: func(ctx context.Context, c *contestant) (values, error) {
			life, err := live(ctx, c.s, network == "host")
			if err != nil {
				return nil, err
			}
			v := values{"start-" + network: {ms(life.start.Total())}, "stop-sandbox-" + network: {ms(life.stopSandbox)}}
			if network == "host" {
				v["stop-container"] = []float64{ms(life.stopContainer)}
			}
			if c.s.AccountsCPU() {
				v["cpu-"+network] = []float64{ms(life.cpu)}
			}
			if life.counted {
				v["instructions-"+network] = []float64{float64(life.instructions) / 1e6}
			}
			return v, nil
		},
	}
}

// life holds the measurements of one pod.
type life struct {
	start                           subject.Start
	stopContainer, stopSandbox, cpu time.Duration

	counted      bool // the machine counts instructions
	instructions uint64
}

// live runs one pod through kubelet's calls. Before the stop it waits until the runtime rests, so
// that work of the start does not count as work of the stop.
func live(ctx context.Context, s *subject.Subject, hostNetwork bool) (l life, err error) {
	begun, counted, err := s.Instructions()
	if err != nil {
		return l, err
	}
	before, err := s.CPU()
	if err != nil {
		return l, err
	}
	var pod *subject.Pod
	if pod, l.start, err = s.Start(ctx, hostNetwork); err != nil {
		return l, err
	}
	if err := s.AwaitReady(ctx); err != nil {
		return l, err
	}
	if err := s.Rest(ctx); err != nil {
		return l, err
	}
	if l.stopContainer, err = pod.StopContainer(ctx); err != nil {
		return l, err
	}
	if l.stopSandbox, err = pod.Stop(ctx); err != nil {
		return l, err
	}
	if err := pod.RemoveContainer(ctx); err != nil {
		return l, err
	}
	if err := pod.Remove(ctx); err != nil {
		return l, err
	}
	if err := s.Rest(ctx); err != nil {
		return l, err
	}
	after, err := s.CPU()
	if err != nil {
		return l, err
	}
	l.cpu, l.counted = after-before, counted
	ended, _, err := s.Instructions()
	l.instructions = ended - begun
	return l, err
}

const (
	burstPods  = 64
	burstWidth = 8
)

// burstRounds is the minimum number of a runtime's bursts. Other load on the machine affects all
// pods of a burst, so one burst does not suffice.
const burstRounds = 4

// burst starts many pods at the same time.
func burst(network string, applies func(*subject.Subject) bool) experiment {
	row := "burst-" + network
	return experiment{
		name: "64 pods, 8 at a time, " + network, rows: []string{row}, applies: applies, warmUp: 1, limit: 3 * time.Minute, budget: 3 * time.Minute,
		samples: func(wanted int) int { return max(burstRounds, (wanted+burstPods-1)/burstPods) },
		sample: func(ctx context.Context, c *contestant) (values, error) {
			var times [burstPods]time.Duration
			var pods [burstPods]*subject.Pod
			err := inParallel(ctx, burstPods, func(ctx context.Context, i int) error {
				pod, start, err := c.s.Start(ctx, network == "host")
				pods[i], times[i] = pod, start.Total()
				return err
			})
			if err != nil {
				return nil, err
			}
			err = inParallel(ctx, burstPods, func(ctx context.Context, i int) error { return pods[i].Remove(ctx) })
			v := values{}
			for _, t := range times {
				v[row] = append(v[row], ms(t))
			}
			return v, err
		},
	}
}

// inParallel calls f for 0 to n-1, 8 at a time.
func inParallel(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(burstWidth)
	for i := range n {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return f(ctx, i)
		})
	}
	return group.Wait()
}

// calls measures calls to a running pod.
var calls = experiment{
	name: "calls", rows: []string{"exec", "exec-cpu", "status"}, applies: plugins,
	warmUp: 3, samples: wanted, limit: time.Minute, budget: time.Minute,
	prepare: func(ctx context.Context, _ *bench, s *subject.Subject) (any, error) {
		pod, _, err := s.Start(ctx, true)
		return pod, err
	},
	sample: func(ctx context.Context, c *contestant) (values, error) {
		pod := c.state.(*subject.Pod)
		before, err := c.s.CPU()
		if err != nil {
			return nil, err
		}
		exec, err := pod.Exec(ctx)
		if err != nil {
			return nil, err
		}
		if err := c.s.Rest(ctx); err != nil {
			return nil, err
		}
		after, err := c.s.CPU()
		if err != nil {
			return nil, err
		}
		v := values{"exec": {ms(exec)}}
		if c.s.AccountsCPU() {
			v["exec-cpu"] = []float64{ms(after - before)}
		}
		for range 3 {
			status, err := pod.Status(ctx)
			if err != nil {
				return nil, err
			}
			v["status"] = append(v["status"], ms(status))
		}
		return v, nil
	},
}

// memoryPods is the number of pods while memory is measured.
const memoryPods = 20

// memory compares the memory with pods to the memory without, after a restart of the daemon if the
// benchmark started it. A sample removes its pods, so that only one runtime has pods at a time.
var memory = experiment{
	name: "memory", rows: []string{"pss-pod", "pss-daemon-idle", "pss-all-idle", "pss-daemon-20", "pss-all-20"}, applies: plugins,
	samples: atMost(10), limit: 3 * time.Minute, budget: 2 * time.Minute,
	sample: func(ctx context.Context, c *contestant) (values, error) {
		if c.s.Daemon != nil {
			if _, err := c.s.Restart(ctx, 0); err != nil {
				return nil, err
			}
		}
		before, err := c.s.SettledMemory(ctx)
		if err != nil {
			return nil, err
		}
		for range memoryPods {
			if _, _, err := c.s.Start(ctx, true); err != nil {
				return nil, err
			}
		}
		after, err := c.s.SettledMemory(ctx)
		if err != nil {
			return nil, err
		}
		return values{
			"pss-pod":         {mib((after.Others - before.Others) / memoryPods)},
			"pss-daemon-idle": {mib(before.Daemon)}, "pss-all-idle": {mib(before.Daemon + before.Kept)},
			"pss-daemon-20": {mib(after.Daemon)}, "pss-all-20": {mib(after.Daemon + after.Kept)},
		}, c.s.Clean(ctx)
	},
}

// atMost limits the number of samples that take long and vary little.
func atMost(n int) func(int) int { return func(wanted int) int { return min(wanted, n) } }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
func mib(bytes float64) float64  { return bytes / (1 << 20) }

const (
	fleetPods       = 500
	fleetContainers = 2 // in each pod, created and not started
)

// fleet fills a node with more pods than any node has. It measures lists and a restart of the
// daemon.
var fleet = experiment{
	name: "500 pods with 1,000 containers", rows: []string{"list-1000", "restart-500"}, applies: ownImages, oneByOne: true,
	warmUp: 1, samples: wanted, limit: 6 * time.Minute, budget: time.Minute,
	prepare: func(ctx context.Context, _ *bench, s *subject.Subject) (any, error) {
		return nil, inParallel(ctx, fleetPods, func(ctx context.Context, _ int) error {
			pod, err := s.RunSandbox(ctx, true)
			if err != nil {
				return err
			}
			for range fleetContainers {
				if err := pod.CreateContainer(ctx); err != nil {
					return fmt.Errorf("CreateContainer: %w", err)
				}
			}
			return nil
		})
	},
	sample: func(ctx context.Context, c *contestant) (values, error) {
		v := values{}
		for range 3 {
			n, took, err := c.s.ListContainers(ctx)
			if err != nil {
				return nil, err
			}
			if c.s.Daemon != nil && n != fleetPods*fleetContainers {
				return nil, fmt.Errorf("ListContainers: %d containers, want %d", n, fleetPods*fleetContainers)
			}
			v["list-1000"] = append(v["list-1000"], ms(took))
		}
		if c.s.Daemon != nil {
			took, err := c.s.Restart(ctx, fleetPods)
			if err != nil {
				return nil, err
			}
			v["restart-500"] = []float64{took.Seconds()}
		}
		return v, nil
	},
}

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
