package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// ContainerTarget is a container to connect to.
type ContainerTarget struct {
	ID       string
	PodID    string
	Process  *specs.Process      // template for execs
	Runtime  *ociruntime.Runtime // nil: libcontainer
	Cgroup   string              // cgroupsPath of the runtime-spec
	Terminal bool                // the container has a terminal
	Stdin    bool                // the container reads stdin
	// StdinOnce says that the container's stdin is closed when the stdin of its first client ends.
	StdinOnce bool
	Running   bool
	Keep      []*os.File // to hold open while an exec runs, see proto.Exec.Keep
}

func (c ContainerTarget) String() string { return "container " + c.ID }

// pod returns the key of the container's pod for the per-pod limits.
func (c ContainerTarget) pod() PodTarget { return PodTarget{ID: c.PodID} }

// PodTarget is a pod to connect to.
type PodTarget struct {
	ID    string
	NetNS string // path; empty: the host's
	Ready bool

	Sandboxed bool // its runtime may have a separate network stack
}

func (p PodTarget) String() string { return "pod " + p.ID }

// Targets returns the current state of containers and pods by ID or unique ID prefix. Errors are
// NotFound, and InvalidArgument for an ambiguous prefix. The methods do not block.
type Targets interface {
	StreamContainer(id string) (ContainerTarget, error)
	StreamPod(id string) (PodTarget, error)
}

// Service connects clients to containers and pods.
type Service struct {
	targets   Targets
	launchers *shim.Launchers
	node      state.Node
	tasks     *task.Runner // its Operations own the sessions
	dials     *dialLimiter
	outputs   *outputBudget
	execs     *slots
	connected *slots // execs with a client
	attached  *slots // attached containers and forwarded ports, per pod
	terminals *slots // attached terminals
	holds     holds
}

// New returns a Service for these targets.
func New(targets Targets, launchers *shim.Launchers, node state.Node, limits Limits,
	tasks *task.Runner) *Service {
	s := &Service{targets: targets, launchers: launchers, node: node, tasks: tasks,
		dials: newDialLimiter(), outputs: &outputBudget{},
		execs:     newSlots("execs", limits.Execs, limits.ExecsPerContainer),
		connected: newSlots("exec sessions", limits.execSessions(), limits.ExecsPerContainer),
		attached:  newSlots("attached sessions and forwarded connections", limits.Sessions, limits.podSessions())}
	s.terminals = newSlots("attached terminals", limits.Sessions, limits.Sessions)
	s.connected.spare, s.attached.spare = spareDescriptors, spareDescriptors
	return s
}

// spareDescriptors returns ResourceExhausted if another session would use descriptors that are
// reserved for CRI and the daemon.
func spareDescriptors() error {
	quota, err := NewFDQuota()
	if err != nil {
		return err
	}
	return quota.Check()
}

// sessions returns a runner whose goroutines belong to the Operations.
func (s *Service) sessions() runner {
	return runner{Launchers: s.launchers, dials: s.dials, outputs: s.outputs, Spawn: s.tasks.Operations.Spawn}
}

// ExecSync runs a command in a container and returns its output and exit code. timeout limits the
// run, unless it is 0. On timeout it kills the command and everything it started, and returns
// DeadlineExceeded.
//
// The session ends with the command's exit. It does not wait for background processes that still
// have stdout open.
func (s *Service) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*Result, error) {
	c, err := s.execTarget(id, command)
	if err != nil {
		return nil, err
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	release, err := s.takeExec(ctx, c)
	if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
		return nil, errdefs.DeadlineExceeded("exec in container %s: a checkpoint of it did not end within %v", c.ID, timeout)
	}
	if err != nil {
		return nil, err
	}
	defer release()
	end := s.tasks.BeginOpen
	if timeout > 0 {
		end = func(what, object string) func() { return s.tasks.BeginUpTo(timeout, what, object) }
	}
	defer end("end of exec", c.String())()
	result, err := s.sessions().ExecSync(ctx, s.execRequest(c, Command{Args: command}))
	if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
		return nil, errdefs.DeadlineExceeded("exec in container %s: %q did not end within %v", c.ID, command, timeout)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return result, nil
}

func (s *Service) execRequest(c ContainerTarget, command Command) *proto.Exec {
	process := oci.ExecProcess(&specs.Spec{Process: c.Process}, command.Args, command.Terminal)
	command.Options.apply(process)
	return &proto.Exec{ID: c.ID, Runtime: c.Runtime, Dir: s.node.Shim(c.ID), ExecID: state.NewID()[:16],
		CgroupsPath: c.Cgroup, SystemdCgroup: s.node.SystemdCgroup, Keep: c.Keep,
		Process: process}
}

// CheckExec reports whether Exec would find its container, and returns the full ID. The errors are
// those of Exec.
func (s *Service) CheckExec(id string, command []string) (string, error) {
	c, err := s.execTarget(id, command)
	if err != nil {
		return "", err
	}
	return c.ID, nil
}

func (s *Service) execTarget(id string, command []string) (ContainerTarget, error) {
	c, err := s.runningContainer("exec in", id)
	if err != nil {
		return ContainerTarget{}, err
	}
	if len(command) == 0 || command[0] == "" {
		return ContainerTarget{}, errdefs.InvalidArgument("exec in container %s: the command is empty", c.ID)
	}
	for _, arg := range command {
		if strings.IndexByte(arg, 0) >= 0 { // a runtime would cut the argument there
			return ContainerTarget{}, errdefs.InvalidArgument("exec in container %s: NUL byte in %q", c.ID, errdefs.Clip(arg))
		}
	}
	return c, nil
}

// runningContainer finds a running container. Errors: NotFound; FailedPrecondition if it is not
// running.
func (s *Service) runningContainer(what, id string) (ContainerTarget, error) {
	c, err := s.targets.StreamContainer(id)
	if err != nil {
		return ContainerTarget{}, err
	}
	if !c.Running {
		return ContainerTarget{}, errdefs.FailedPrecondition("%s container %s: it is not running", what, c.ID)
	}
	return c, nil
}

// Exec runs a command in a container, connected to a client, and returns its exit code. The code is
// 128+signal if a signal killed the command. With Terminal the command gets a terminal, and Stdout
// its output. Otherwise the end of Stdin closes the command's stdin.
//
// The session ends with the command's exit, as in ExecSync. When ctx ends because the client
// disconnected, or when Stdout or Stderr fails, Exec kills the command and everything it started.
// (containerd and CRI-O let it run until the container ends, although no client can reach it again.
// A command that must outlive its client can be started in the background.)
//
// Errors: NotFound. FailedPrecondition if the container is not running. InvalidArgument for an
// empty command or impossible options.
func (s *Service) Exec(ctx context.Context, id string, command Command, client IO) (int32, error) {
	c, err := s.execTarget(id, command.Args)
	if err != nil {
		return 0, err
	}
	if err := command.Options.Check(); err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	release, err := s.takeSession(c)
	if err != nil {
		return 0, err
	}
	defer release()
	if err := s.holds.check(c.String()); err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	defer s.tasks.BeginOpen("end of exec", c.String())()
	code, err := s.sessions().Exec(ctx, s.execRequest(c, command), client)
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return code, nil
}

// CheckAttach reports whether Attach would find its container, and returns the full ID. Errors: as
// Attach.
func (s *Service) CheckAttach(id string, terminal bool) (string, error) {
	c, err := s.attachTarget(id, terminal)
	if err != nil {
		return "", err
	}
	return c.ID, nil
}

func (s *Service) attachTarget(id string, terminal bool) (ContainerTarget, error) {
	c, err := s.runningContainer("attach to", id)
	if err != nil {
		return ContainerTarget{}, err
	}
	if c.Terminal != terminal {
		return ContainerTarget{}, errdefs.InvalidArgument(
			"attach to container %s: tty is %t, but the container was created with tty %t", c.ID, terminal, c.Terminal)
	}
	return c, nil
}

// Attach connects a client to a running container's own input and output until the container or ctx
// ends. terminal must match the container's config. Stdin is ignored if the container was created
// without stdin, as in containerd and CRI-O. If the container was created with StdinOnce and
// without a terminal, the end of Stdin closes the container's stdin. Otherwise it ends the session,
// and the container's stdin stays open.
//
// The error is NotFound, FailedPrecondition if the container is not running, InvalidArgument if
// terminal does not match, or Aborted if output is missing.
func (s *Service) Attach(ctx context.Context, id string, terminal bool, client IO) error {
	c, err := s.attachTarget(id, terminal)
	if err != nil {
		return err
	}
	release, err := s.attached.take(c.pod().String())
	if err != nil {
		return err
	}
	defer release()
	if terminal {
		left, err := s.terminals.take(c.String())
		if err != nil {
			return err
		}
		defer left()
		if err := s.holds.check(c.String()); err != nil {
			return fmt.Errorf("attach to container %s: %w", c.ID, err)
		}
	}
	defer s.tasks.BeginOpen("end of attached session", c.String())()
	if err := s.sessions().Attach(ctx, shim.OpenMonitor(s.node.Shim(c.ID)), c, client); err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}

// CheckPortForward reports whether PortForward would find its pod, and returns the full ID. Errors:
// as PortForward.
func (s *Service) CheckPortForward(podID string) (string, error) {
	pod, err := s.forwardTarget(podID)
	if err != nil {
		return "", err
	}
	return pod.ID, nil
}

func (s *Service) forwardTarget(podID string) (PodTarget, error) {
	pod, err := s.targets.StreamPod(podID)
	if err != nil {
		return PodTarget{}, err
	}
	if !pod.Ready {
		return PodTarget{}, errdefs.FailedPrecondition("forward a port of pod sandbox %s: it is not ready", pod.ID)
	}
	return pod, nil
}

// PortForward connects a client to a TCP port on the localhost of a pod, IPv4 first. It returns
// when both sides have ended, one of them fails, or ctx ends. Each side may close its direction and
// continue in the other. Closing stream closes the direction to the client.
//
// After a failure PortForward does not wait for a pending Read from stream. The caller closes
// stream.
//
// Errors: NotFound; InvalidArgument for an invalid port; Unavailable if the port refuses the
// connection. FailedPrecondition if the pod is not ready, or the host cannot reach its localhost.
func (s *Service) PortForward(ctx context.Context, podID string, port int32, stream io.ReadWriteCloser) error {
	pod, err := s.forwardTarget(podID)
	if err != nil {
		return err
	}
	if port < 1 || port > 65535 {
		return errdefs.InvalidArgument("forward a port of pod sandbox %s: invalid port %d", pod.ID, port)
	}
	release, err := s.attached.take(pod.String())
	if err != nil {
		return err
	}
	defer release()
	defer s.tasks.BeginOpen("end of forwarded connection", pod.String())()
	err = s.sessions().Forward(ctx, pod.ID, pod.NetNS, uint16(port), stream)
	if pod.Sandboxed && errors.Is(err, unix.ECONNREFUSED) {
		return errdefs.FailedPrecondition(
			"forward port %d of pod sandbox %s: the host cannot reach the localhost inside its runtime's sandbox", port, pod.ID)
	}
	if err != nil {
		return fmt.Errorf("forward port %d of pod sandbox %s: %w", port, pod.ID, err)
	}
	return nil
}
