package endurance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/internal/testutil"
)

// TestChurn creates pods, runs execs in them and removes them, eight at a time. Meanwhile it kills
// the daemon, launchers and monitors at random. Every exit code must be right, and every start that
// a kill interrupted must succeed when repeated. After each tenth of the pods the test compares the
// daemon and the machine with their state after the second tenth. In the last third the daemon is
// not killed, so that growth of its memory shows.
func TestChurn(t *testing.T) {
	testutil.Long(t)
	pods, kills := 200, 3 // daemon kills in each of the first roundsWithKills rounds
	if harness.Thorough() {
		pods, kills = 5000, 20
	}
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	c := &churn{d: d, client: dial(t, d), seed: rand.Uint64()}
	t.Logf("seed %d", c.seed)

	for round := range rounds {
		if round == roundsWithKills {
			t.Logf("%d kills of the daemon", kills*roundsWithKills)
			kills = 0
		}
		c.round(t, pods/rounds, kills)
		c.compare(t, round)
	}
	t.Logf("%d pods, %d kills of monitors, %d of launchers, of which %d were at work, %d calls repeated",
		c.done.Load(), c.monitorsKilled.Load(), c.launchersKilled.Load(), c.launchersLost.Load(), c.repeated.Load())
	if c.monitorsKilled.Load() == 0 || c.launchersKilled.Load() == 0 {
		t.Error("no process of some kind was killed")
	}
}

const rounds, roundsWithKills = 10, 6

// parallel is the number of pods at a time.
const parallel = 8

type churn struct {
	d      *harness.Daemon
	client client
	seed   uint64

	daemon                         atomic.Int64 // number of kills and starts; odd while no daemon runs
	done, monitorsKilled, repeated atomic.Int64
	launchersKilled, launchersLost atomic.Int64                // lost: killed during a launch or exec
	grown                          func(t *testing.T) []string // returns growth since the second round
	heap                           uint64                      // bytes of the last daemon's heap in use after its first complete round
}

// client is one connection, which reconnects to each new daemon.
type client struct {
	runtimeapi.RuntimeServiceClient
}

func dial(t *testing.T, d *harness.Daemon) client {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, MaxDelay: 20 * time.Millisecond}, MinConnectTimeout: harness.Patience}))
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	return client{runtimeapi.NewRuntimeServiceClient(conn)}
}

// round runs n pods and kills the daemon daemonKills times meanwhile.
func (c *churn) round(t *testing.T, n, daemonKills int) {
	t.Helper()
	var workers sync.WaitGroup
	lives := make(chan *life)
	for range parallel {
		workers.Go(func() {
			for l := range lives {
				if err := l.run(t.Context()); err != nil {
					t.Errorf("pod %s: %v", l.pod.Metadata.Name, err)
				}
				c.done.Add(1)
			}
		})
	}
	random := rand.New(rand.NewPCG(c.seed, uint64(c.done.Load())))
	at := make(map[int]bool)
	for _, i := range random.Perm(n)[:daemonKills] {
		at[i] = true
	}
	for i := range n {
		lives <- c.newLife(t, i)
		if random.IntN(10) == 0 {
			pause(random)
			c.killLauncher(t, random)
		}
		if at[i] {
			pause(random)
			c.daemon.Add(1)
			c.d.Kill(t)
			c.d.Start(t)
			c.daemon.Add(1)
		}
	}
	close(lives)
	workers.Wait()
}

// pause waits for a random time, so that kills do not always hit the start of a pod.
func pause(random *rand.Rand) { time.Sleep(time.Duration(random.IntN(int(50 * time.Millisecond)))) }

// killLauncher kills one of the daemon's launchers, idle or busy.
func (c *churn) killLauncher(t *testing.T, random *rand.Rand) {
	t.Helper()
	launchers := c.d.Launchers()
	if len(launchers) == 0 {
		return
	}
	c.launchersKilled.Add(1)
	if err := unix.Kill(launchers[random.IntN(len(launchers))], unix.SIGKILL); err != nil {
		harness.Equal(t, "error of kill", err, error(unix.ESRCH)) // it has just exited
		c.launchersKilled.Add(-1)
	}
}

// compare reports growth since the second round, and growth of the last daemon's heap since its
// first complete round.
func (c *churn) compare(t *testing.T, round int) {
	t.Helper()
	c.d.WaitIdle(t)
	heap := c.d.HeapInUse(t)
	t.Logf("after %d pods: the daemon has %d kB of memory and %d bytes of its heap in use", c.done.Load(), c.d.Memory(t), heap)
	if round == 1 { // pools fill and some files are created only once in the first two rounds
		c.grown = c.d.WatchGrowth(t)
	}
	if round > 1 {
		if grown := c.grown(t); len(grown) > 0 {
			t.Errorf("growth after %d pods:\n  %s", c.done.Load(), strings.Join(grown, "\n  "))
		}
	}
	if round == roundsWithKills {
		c.heap = heap
	}
	if round > roundsWithKills && heap > c.heap+heapMargin {
		t.Errorf("after %d pods the daemon has %d bytes of its heap in use, before %d", c.done.Load(), heap, c.heap)
	}
}

// heapMargin bounds variations of the heap of an idle daemon, caused by connections and buffers.
// The measured variation is 200 KiB.
const heapMargin = 256 << 10

// life is one pod with one container.
type life struct {
	*churn
	random      *rand.Rand
	pod         *runtimeapi.PodSandboxConfig
	podID       string
	container   *runtimeapi.ContainerConfig
	containerID string
}

func (c *churn) newLife(t *testing.T, i int) *life {
	t.Helper()
	options := []harness.PodOption{harness.HostNetwork}
	if i%2 == 0 {
		options = nil // in its own network namespace
	}
	l := &life{churn: c, random: rand.New(rand.NewPCG(c.seed, uint64(c.d.PodCount()))), pod: c.d.PodConfig(t, options...)}
	pod := &harness.Pod{D: c.d, Config: l.pod}
	l.container = pod.ContainerConfig()
	harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(l.pod.LogDirectory, l.container.LogPath)), 0o755))
	return l
}

// run runs the pod through its complete life. It draws all random numbers first, so that they do
// not depend on the results of calls.
func (l *life) run(ctx context.Context) error {
	code, execCode := int32(l.random.IntN(128)), int32(l.random.IntN(128))
	killMonitor, removeContainer := l.random.IntN(20) == 0, l.random.IntN(2) == 0
	l.container.Command = []string{"sh", "-c", fmt.Sprintf("trap 'exit %d' TERM; >/tmp/ready; sleep 100000 & wait", code)}

	if err := l.start(ctx, execCode); err != nil {
		return err
	}
	reason := "Error"
	if code == 0 {
		reason = "Completed"
	}
	end := l.stop
	if killMonitor {
		end, code, reason = l.killMonitor, 255, "ShimLost"
	}
	if err := end(ctx); err != nil {
		return err
	}
	if err := l.checkEnd(ctx, code, reason); err != nil {
		return err
	}
	return l.remove(ctx, removeContainer)
}

// start runs the pod with a container that executes a command. If a killed launcher prevents or
// ends the container, start creates the next attempt, as kubelet does.
func (l *life) start(ctx context.Context, execCode int32) error {
	pod, err := ask(ctx, l.churn, l.client.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: l.pod})
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	l.podID = pod.PodSandboxId
	for {
		err := l.startContainer(ctx)
		if err == nil {
			err = l.exec(ctx, execCode)
		}
		if err == nil || !l.endedWithItsLauncher(ctx) {
			return err
		}
		l.container.Metadata.Attempt++
	}
}

// startContainer creates and starts the container. It repeats a start that was interrupted by a
// kill of the daemon.
func (l *life) startContainer(ctx context.Context) error {
	container, err := ask(ctx, l.churn, l.client.CreateContainer, &runtimeapi.CreateContainerRequest{PodSandboxId: l.podID, Config: l.container, SandboxConfig: l.pod})
	if err != nil {
		return fmt.Errorf("create container: %w", err)
	}
	l.containerID = container.ContainerId
	if _, err = ask(ctx, l.churn, l.client.StartContainer, &runtimeapi.StartContainerRequest{ContainerId: l.containerID}); err != nil {
		return fmt.Errorf("start container: %w", err)
	}
	return nil
}

// endedWithItsLauncher reports whether a killed launcher prevented or ended the container.
func (l *life) endedWithItsLauncher(ctx context.Context) bool {
	if l.launchersKilled.Load() == 0 {
		return false
	}
	err := harness.WaitFor(func() error {
		answer, err := ask(ctx, l.churn, l.client.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: l.containerID})
		if err != nil {
			return err
		}
		s := answer.Status
		notStarted := s.Reason == "StartError" && s.ExitCode == 128 && strings.Contains(s.Message, launcherLost)
		killedBeforeItWasMonitor := s.Reason == "ShimLost" && s.ExitCode == 255
		if s.State != runtimeapi.ContainerState_CONTAINER_EXITED || !notStarted && !killedBeforeItWasMonitor {
			return fmt.Errorf("container is %v", s)
		}
		return nil
	})
	return err == nil
}

func (l *life) exec(ctx context.Context, code int32) error {
	script := fmt.Sprintf("until [ -e /tmp/ready ]; do sleep 0.01; done; exit %d", code)
	answer, err := ask(ctx, l.churn, l.client.ExecSync, &runtimeapi.ExecSyncRequest{ContainerId: l.containerID, Cmd: []string{"sh", "-c", script}, Timeout: 60})
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	if answer.ExitCode != code {
		return fmt.Errorf("exec ended with %d, want %d", answer.ExitCode, code)
	}
	return nil
}

func (l *life) stop(ctx context.Context) error {
	_, err := ask(ctx, l.churn, l.client.StopContainer, &runtimeapi.StopContainerRequest{ContainerId: l.containerID, Timeout: 60})
	return err
}

func (l *life) killMonitor(context.Context) error {
	data, err := os.ReadFile(filepath.Join(l.d.State, "c", l.containerID, "shim"))
	if err != nil {
		return err
	}
	var pid int
	if _, err := fmt.Sscan(string(data), &pid); err != nil {
		return fmt.Errorf("monitor of %s: %w", l.containerID, err)
	}
	l.monitorsKilled.Add(1)
	return unix.Kill(pid, unix.SIGKILL)
}

func (l *life) checkEnd(ctx context.Context, code int32, reason string) error {
	return harness.WaitFor(func() error {
		answer, err := ask(ctx, l.churn, l.client.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: l.containerID})
		if err != nil {
			return err
		}
		s := answer.Status
		if s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.ExitCode != code || s.Reason != reason {
			return fmt.Errorf("container %s is %v with code %d, %s: %s; want code %d, %s", s.Id, s.State, s.ExitCode, s.Reason, s.Message, code, reason)
		}
		return nil
	})
}

func (l *life) remove(ctx context.Context, containerFirst bool) error {
	if containerFirst {
		if _, err := ask(ctx, l.churn, l.client.RemoveContainer, &runtimeapi.RemoveContainerRequest{ContainerId: l.containerID}); err != nil {
			return fmt.Errorf("remove container: %w", err)
		}
	}
	if _, err := ask(ctx, l.churn, l.client.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: l.podID}); err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	if _, err := ask(ctx, l.churn, l.client.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: l.podID}); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return os.RemoveAll(l.pod.LogDirectory)
}

// launcherLost is part of the error of calls whose launcher was killed.
const launcherLost = "the launcher is lost"

// lostLauncher reports whether a call failed because its launcher was killed.
func lostLauncher(err error) bool {
	return err != nil && (strings.Contains(err.Error(), launcherLost) || strings.Contains(err.Error(), "ask the launcher"))
}

// longest is kubelet's longest timeout, that of RunPodSandbox.
const longest = 4 * time.Minute

// ask makes a call. It repeats the call as kubelet does if the daemon or the launcher was killed
// meanwhile.
func ask[Request, Response any](ctx context.Context, c *churn, call func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request) (Response, error) {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	for {
		daemon := c.daemon.Load()
		response, err := call(ctx, request, grpc.WaitForReady(true))
		switch {
		case status.Code(err) == codes.Unavailable && (daemon%2 == 1 || c.daemon.Load() != daemon):
		case lostLauncher(err) && c.launchersLost.Add(1) <= c.launchersKilled.Load():
		default:
			return response, err
		}
		c.repeated.Add(1)
	}
}
