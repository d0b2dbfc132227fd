package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// prober calls the daemon a hundred times a second, without waiting for earlier answers.
type prober struct {
	client    runtimeapi.RuntimeServiceClient
	container string

	mu sync.Mutex
	// +checklocks:mu
	answers []time.Time
	// +checklocks:mu
	cut []error // of calls that a restart has cut
	// +checklocks:mu
	refused int // of these, calls that could not connect
	// +checklocks:mu
	failed []error // other errors
}

const (
	probePause = 10 * time.Millisecond
	mostProbes = 50 // at the same time, because a busy node answers more slowly than this client calls
)

// run probes until ctx ends, and returns when all calls have ended.
func (p *prober) run(ctx context.Context) {
	ticks := time.NewTicker(probePause)
	defer ticks.Stop()
	var calls sync.WaitGroup
	defer calls.Wait()
	free := make(chan struct{}, mostProbes)
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		select {
		case free <- struct{}{}:
			calls.Go(func() {
				p.probe(context.WithoutCancel(ctx), n)
				<-free
			})
		default:
		}
	}
}

// probe makes one call, and repeats it if a restart has cut it.
func (p *prober) probe(ctx context.Context, n int) {
	for {
		var err error
		switch n % 10 {
		case 0:
			_, err = p.client.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: p.container, Cmd: []string{"true"}, Timeout: 60})
		case 1, 2, 3:
			_, err = p.client.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		default:
			_, err = p.client.Status(ctx, &runtimeapi.StatusRequest{})
		}
		if !p.note(err) {
			return
		}
		time.Sleep(probePause)
	}
}

// note records the result of a call. It reports whether the client repeats it.
func (p *prober) note(err error) (repeat bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		p.answers = append(p.answers, time.Now())
	case harness.CodeOf(err) == codes.Unavailable:
		p.cut = append(p.cut, err)
		if strings.Contains(err.Error(), "dial") {
			p.refused++
		}
		return true
	default:
		p.failed = append(p.failed, err)
	}
	return false
}

// gap returns the longest time without an answer between two times.
func (p *prober) gap(from, to time.Time) (longest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := from
	for _, at := range p.answers {
		if at.After(from) && at.Before(to) {
			longest = max(longest, at.Sub(last))
			last = at
		}
	}
	return longest
}

// upgrade replaces the daemon by another. It returns the longest time without an answer, and how
// long the stop and the start took.
func (p *prober) upgrade(t *testing.T, d *harness.Daemon) (gap, stop, start time.Duration) {
	t.Helper()
	gap = p.during(t, func() { stop, start = upgrade(t, d) })
	return gap, stop, start
}

// upgrade replaces the daemon by another, and returns how long the stop and the start took.
func upgrade(t *testing.T, d *harness.Daemon) (stop, start time.Duration) {
	t.Helper()
	d.Disconnect(t)
	from := time.Now()
	d.Signal(t, syscall.SIGTERM)
	stopped := time.Now()
	d.Start(t)
	return stopped.Sub(from), time.Since(stopped)
}

// during returns the longest time without an answer from the start of a restart to the first answer
// after it.
func (p *prober) during(t *testing.T, restart func()) (gap time.Duration) {
	t.Helper()
	from := time.Now()
	restart()
	serves := time.Now()
	harness.Eventually(t, "probes are answered", func() error {
		if p.gap(serves, time.Now()) == 0 {
			return fmt.Errorf("no answer")
		}
		return nil
	})
	return p.gap(from, time.Now())
}

// results describes the answers, the calls that a restart has cut, and other failures.
func (p *prober) results() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	describe := func(errs []error) string {
		if len(errs) == 0 {
			return "0"
		}
		return fmt.Sprintf("%d (such as %v)", len(errs), errs[0])
	}
	return fmt.Sprintf("%d calls answered, %s cut, %s failed otherwise", len(p.answers), describe(p.cut), describe(p.failed))
}

// check expects that no call was refused and that none failed. All calls must have ended.
func (p *prober) check(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	harness.Equal(t, "number of refused connections", p.refused, 0)
	if len(p.failed) > 0 {
		t.Errorf("%d calls failed, the first with: %v", len(p.failed), p.failed[0])
	}
}

// podChurn starts and stops pods until ctx ends.
type podChurn struct {
	done   atomic.Int32 // number of pods
	failed chan error
}

const churnWorkers = 2

func startAndStopPods(ctx context.Context, t *testing.T, d *harness.Daemon) (c *podChurn, wait func()) {
	c = &podChurn{failed: make(chan error, churnWorkers)}
	client := harness.RawRuntime(t, d)
	for range churnWorkers {
		go func() {
			var err error
			for ctx.Err() == nil && err == nil {
				err = c.one(context.WithoutCancel(ctx), client, d.PodConfig(t, harness.HostNetwork))
			}
			c.failed <- err
		}()
	}
	return c, func() {
		for range churnWorkers {
			harness.Must(t, <-c.failed)
		}
	}
}

func (c *podChurn) one(ctx context.Context, client runtimeapi.RuntimeServiceClient, config *runtimeapi.PodSandboxConfig) error {
	var id string
	for _, call := range []func() error{
		func() error {
			pod, err := client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
			id = pod.GetPodSandboxId()
			return err
		},
		func() error {
			_, err := client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
			return err
		},
		func() error {
			_, err := client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
			return err
		},
	} {
		if err := retryCut(call); err != nil {
			return err
		}
	}
	c.done.Add(1)
	return nil
}

// While systemd holds the socket and the daemon is replaced again and again, no client is refused,
// and a client that repeats calls in flight sees no error.
func TestUpgradesUnderLoad(t *testing.T) {
	pods, upgrades := 20, 3
	if testutil.AllTests() {
		pods, upgrades = 500, 50
	}
	d := harness.StartDaemon(t, harness.WithHeldSocket)
	var all []*harness.Pod
	for range pods {
		all = append(all, d.RunPod(t, harness.HostNetwork))
	}
	target := all[0].Run(t)
	p := &prober{client: harness.RawRuntime(t, d), container: target.Id}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var probing sync.WaitGroup
	probing.Go(func() { p.run(ctx) })
	churn, wait := startAndStopPods(ctx, t, d)
	began := time.Now()
	var gaps, stops, starts []time.Duration
	for n := range upgrades {
		harness.Eventually(t, "pods were started and stopped", func() error {
			if done := churn.done.Load(); int(done) < 4*n {
				return fmt.Errorf("%d", done)
			}
			return nil
		})
		gap, stop, start := p.upgrade(t, d)
		gaps, stops, starts = append(gaps, gap), append(stops, stop), append(starts, start)
	}
	rate := float64(churn.done.Load()) / time.Since(began).Seconds()
	cancel()
	wait()
	probing.Wait()
	p.check(t)
	t.Logf("%d pods, %d upgrades, %.1f pods a second started and stopped: %s; gap: %s; stop: %s; start: %s",
		pods, upgrades, rate, p.results(), spread(gaps), spread(stops), spread(starts))
	for _, pod := range all {
		pod.Remove(t)
	}
}

// spread describes durations by their median and maximum.
func spread(all []time.Duration) string {
	slices.Sort(all)
	return fmt.Sprintf("median %s, longest %s", all[len(all)/2].Round(time.Millisecond), all[len(all)-1].Round(time.Millisecond))
}

// A long ExecSync does not delay the daemon's end. Its command is killed, and does not run again.
func TestExecSyncIsCutByUpgrade(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHeldSocket)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	client := harness.RawRuntime(t, d)
	ended := make(chan error, 1)
	go func() {
		_, err := client.ExecSync(context.WithoutCancel(t.Context()), &runtimeapi.ExecSyncRequest{
			ContainerId: c.Id, Cmd: []string{"sh", "-c", "echo ran >>/tmp/runs; exec sleep 110987"}})
		ended <- err
	}()
	look := func(command string) string { return c.Exec(t, "sh", "-c", command) }
	harness.EventuallyTrue(t, "the command runs", func() bool { return look("cat /tmp/runs || true") == "ran" })
	d.Stop(t)
	harness.WantCode(t, <-ended, codes.Unavailable)
	if log := d.Tail(); strings.Contains(log, "cancel requests that still run") {
		t.Errorf("the stop waited for the command:\n%s", log)
	}
	d.Start(t)
	harness.Equal(t, "runs", look("cat /tmp/runs"), "ran")
	harness.EventuallyTrue(t, "the command is killed", func() bool { return len(machine.ProcessesOf("sleep 110987")) == 0 })
}

// A stop of a container that is in flight does not delay the daemon's end. It goes on at the next
// daemon, and its client sees no error.
func TestStopInFlightGoesOnAfterUpgrade(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHeldSocket)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Script("trap 'echo asked' TERM; echo ready; while :; do sleep 0.1; done"))
	c.WaitOutput(t, "ready")
	client := harness.RawRuntime(t, d)
	stopped := make(chan error, 1)
	go func() {
		_, err := client.StopContainer(context.WithoutCancel(t.Context()),
			&runtimeapi.StopContainerRequest{ContainerId: c.Id, Timeout: 3600})
		stopped <- err
	}()
	c.WaitOutput(t, "asked")
	d.Disconnect(t)
	d.Signal(t, syscall.SIGTERM)
	d.Start(t)
	harness.Equal(t, "state after the upgrade", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	_, err := client.StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: c.Id})
	harness.Must(t, err)
	harness.Must(t, <-stopped)
	harness.Equal(t, "state after the other stop", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_EXITED)
}
