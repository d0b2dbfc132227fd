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
)

// Pods are created, exec'd and removed, eight at a time, while daemon and monitors are killed at random. Every exit code is
// right, and what daemon and machine hold does not grow: it is compared at the end of each tenth of the pods, when none is left,
// with what it was after the second. In the last third the daemon is not killed, so that its own growth shows.
func TestChurn(t *testing.T) {
	pods, kills := 200, 3 // kills of the daemon in each round that has some
	if harness.Thorough() {
		pods, kills = 5000, 20
	}
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	c := &churn{d: d, client: dial(t, d), seed: rand.Uint64()}
	t.Logf("seed %d", c.seed)

	const rounds, roundsWithKills = 10, 6
	for round := range rounds {
		if round == roundsWithKills {
			t.Logf("%d kills of the daemon", kills*roundsWithKills)
			kills = 0
		}
		c.round(t, pods/rounds, kills)
		c.compare(t, round)
	}
	t.Logf("%d pods, %d kills of monitors, %d calls repeated, %d starts undone", c.done.Load(), c.monitorsKilled.Load(), c.repeated.Load(), c.undone.Load())
}

// parallel is how many pods are worked on at a time.
const parallel = 8

type churn struct {
	d      *harness.Daemon
	client client
	seed   uint64

	done, monitorsKilled, repeated, undone atomic.Int64
	held                                   func(t *testing.T) []string // compares with what was held after the second round
	memory                                 int                         // kB that the daemon had then
}

// client is one connection, which finds each new daemon by itself.
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

// round works on n pods, and kills the daemon so many times meanwhile.
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
	next := 0
	for i := range n {
		lives <- c.newLife(t, i)
		if next < daemonKills && i >= (next+1)*n/(daemonKills+1) {
			next++
			c.d.Kill(t)
			c.d.Start(t)
		}
	}
	close(lives)
	workers.Wait()
}

// compare tells of what is there more than after the second round.
func (c *churn) compare(t *testing.T, round int) {
	t.Helper()
	c.d.WaitIdle(t)
	memory := c.d.Memory(t)
	t.Logf("after %d pods: daemon %d kB", c.done.Load(), memory)
	switch {
	case round < 1: // pools fill, files are made once
	case round == 1:
		c.held, c.memory = c.d.Held(t), memory
	default:
		if grown := c.held(t); len(grown) > 0 {
			t.Errorf("after %d pods there is more:\n  %s", c.done.Load(), strings.Join(grown, "\n  "))
		}
		// Go gives memory back late; what leaks with each pod goes beyond any such margin.
		if margin := c.memory / 2; memory > c.memory+margin {
			t.Errorf("after %d pods the daemon takes %d kB, before %d kB", c.done.Load(), memory, c.memory)
		}
	}
}

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
		options = nil // a network of its own
	}
	l := &life{churn: c, random: rand.New(rand.NewPCG(c.seed, uint64(c.d.PodCount()))), pod: c.d.PodConfig(t, options...)}
	pod := &harness.Pod{D: c.d, Config: l.pod}
	l.container = pod.ContainerConfig()
	harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(l.pod.LogDirectory, l.container.LogPath)), 0o755))
	return l
}

// run is a whole life. All random numbers are drawn first, so that they do not depend on how it goes.
func (l *life) run(ctx context.Context) error {
	code, execCode := int32(l.random.IntN(128)), int32(l.random.IntN(128))
	killMonitor, removeContainer := l.random.IntN(20) == 0, l.random.IntN(2) == 0
	l.container.Command = []string{"sh", "-c", fmt.Sprintf("trap 'exit %d' TERM; >/tmp/ready; sleep 100000 & wait", code)}

	if err := l.start(ctx); err != nil {
		return err
	}
	if err := l.exec(ctx, execCode); err != nil {
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

func (l *life) start(ctx context.Context) error {
	pod, err := repeat(ctx, l.churn, l.client.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: l.pod})
	if err != nil {
		return fmt.Errorf("run: %w", err)
	}
	l.podID = pod.PodSandboxId
	for {
		if started, err := l.startContainer(ctx); started || err != nil {
			return err
		}
		l.container.Metadata.Attempt++
	}
}

// startContainer creates and starts the container. A start that the daemon did not survive may have been undone:
// then the container has exited, and kubelet, which sees that, makes another one.
func (l *life) startContainer(ctx context.Context) (started bool, err error) {
	container, err := repeat(ctx, l.churn, l.client.CreateContainer, &runtimeapi.CreateContainerRequest{PodSandboxId: l.podID, Config: l.container, SandboxConfig: l.pod})
	if err != nil {
		return false, fmt.Errorf("create container: %w", err)
	}
	l.containerID = container.ContainerId
	calls := 0
	_, err = repeat(ctx, l.churn, func(ctx context.Context, request *runtimeapi.StartContainerRequest, o ...grpc.CallOption) (*runtimeapi.StartContainerResponse, error) {
		calls++
		return l.client.StartContainer(ctx, request, o...)
	}, &runtimeapi.StartContainerRequest{ContainerId: l.containerID})
	if calls == 1 || status.Code(err) != codes.FailedPrecondition {
		return err == nil, err
	}
	answer, err := repeat(ctx, l.churn, l.client.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: l.containerID})
	if err != nil {
		return false, err
	}
	switch s := answer.Status; {
	case s.State == runtimeapi.ContainerState_CONTAINER_RUNNING:
		return true, nil
	case s.State == runtimeapi.ContainerState_CONTAINER_EXITED && s.ExitCode != 0:
		l.undone.Add(1)
		return false, nil
	default:
		return false, fmt.Errorf("container after the daemon died at its start: %v", s)
	}
}

func (l *life) exec(ctx context.Context, code int32) error {
	script := fmt.Sprintf("until [ -e /tmp/ready ]; do sleep 0.01; done; exit %d", code)
	answer, err := repeat(ctx, l.churn, l.client.ExecSync, &runtimeapi.ExecSyncRequest{ContainerId: l.containerID, Cmd: []string{"sh", "-c", script}, Timeout: 60})
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	if answer.ExitCode != code {
		return fmt.Errorf("exec ended with %d, want %d", answer.ExitCode, code)
	}
	return nil
}

func (l *life) stop(ctx context.Context) error {
	_, err := repeat(ctx, l.churn, l.client.StopContainer, &runtimeapi.StopContainerRequest{ContainerId: l.containerID, Timeout: 60})
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
		answer, err := repeat(ctx, l.churn, l.client.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: l.containerID})
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
		if _, err := repeat(ctx, l.churn, l.client.RemoveContainer, &runtimeapi.RemoveContainerRequest{ContainerId: l.containerID}); err != nil {
			return fmt.Errorf("remove container: %w", err)
		}
	}
	if _, err := repeat(ctx, l.churn, l.client.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: l.podID}); err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	if _, err := repeat(ctx, l.churn, l.client.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: l.podID}); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return os.RemoveAll(l.pod.LogDirectory)
}

// repeat calls until the daemon answers, as kubelet does.
func repeat[Request, Response any](ctx context.Context, c *churn, call func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request) (Response, error) {
	for {
		response, err := call(ctx, request, grpc.WaitForReady(true))
		if status.Code(err) != codes.Unavailable {
			return response, err
		}
		c.repeated.Add(1)
	}
}
