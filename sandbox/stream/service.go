package stream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/state"
	"berth/sandbox/stream/copying"
	"berth/shim"
	"berth/shim/ociruntime"
	"berth/shim/proto"
	"berth/shim/running"
)

// ContainerTarget is a container to connect to.
type ContainerTarget struct {
	ID      string
	PodID   string
	Process *specs.Process      // template for execs
	Runtime *ociruntime.Runtime // nil: libcontainer
	Cgroup  string              // cgroupsPath of the runtime-spec
	Running bool
	Keep    []*os.File // to hold open while an exec runs, see proto.Exec.Keep

	copying.Target // its own streams
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
	quota, err := copying.NewFDQuota()
	if err != nil {
		return err
	}
	return quota.Check()
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
	result, err := s.run(ctx, s.execRequest(c, Command{Args: command}))
	if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
		return nil, errdefs.DeadlineExceeded("exec in container %s: %q did not end within %v", c.ID, command, timeout)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return result, nil
}

// Result is the result of ExecSync.
type Result struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// run runs a command without a client and returns its output, up to MaxOutput. When all ExecSyncs
// exceed their shared budget, it kills the command and returns ResourceExhausted.
func (s *Service) run(ctx context.Context, request *proto.Exec) (*Result, error) {
	output := newCapture(s.outputs)
	defer output.release()
	process, kept, err := s.start(ctx, request, false, true, true)
	if err != nil {
		return nil, err
	}
	spawn := copying.Spawn(s.tasks.Operations.Spawn)
	code, err := spawn.Exec(ctx, process, kept, copying.IO{Stdout: output.writer(0), Stderr: output.writer(1)})
	if err != nil {
		return nil, err
	}
	stdout, stderr := output.kept()
	return &Result{ExitCode: code, Stdout: stdout, Stderr: stderr}, nil
}

// start starts a command with the streams that are wanted. The caller owns the process and the kept
// ends of its pipes.
func (s *Service) start(ctx context.Context, request *proto.Exec, stdin, stdout, stderr bool) (
	*shim.Exec, copying.Pipes, error) {
	if request.Process.Terminal {
		stdin, stdout, stderr = false, false, false
	}
	theirs, kept, err := copying.OpenPipes(stdin, stdout, stderr)
	if err != nil {
		return nil, kept, err
	}
	defer theirs.Close() // otherwise neither side would see that the other has closed the pipe
	request.Stdin, request.Stdout, request.Stderr = theirs[0], theirs[1], theirs[2]
	process, err := s.launchers.Exec(ctx, request)
	if err != nil {
		kept.Close()
		return nil, kept, err
	}
	return process, kept, nil
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

// StartExec starts a command in a container for a client's session. The session's process connects
// the client, and kills the command when the client disconnects. (containerd and CRI-O let it run
// until the container ends, although no client can reach it again. A command that must outlive its
// client can be started in the background.) With Terminal the command has a console, and otherwise
// the streams that are wanted.
//
// The caller owns the process and the kept ends of its pipes, and calls release after the session.
//
// Errors: NotFound. FailedPrecondition if the container is not running. InvalidArgument for an
// empty command or impossible options.
func (s *Service) StartExec(ctx context.Context, id string, command Command, stdin, stdout, stderr bool) (
	process *shim.Exec, kept copying.Pipes, release func(), err error) {
	c, err := s.execTarget(id, command.Args)
	if err != nil {
		return nil, kept, nil, err
	}
	if err := command.Options.Check(); err != nil {
		return nil, kept, nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	release, err = s.beginExec(c, limited)
	if err != nil {
		return nil, kept, nil, err
	}
	err = s.holds.check(c.String())
	if err == nil {
		process, kept, err = s.start(ctx, s.execRequest(c, command), stdin, stdout, stderr)
	}
	if err != nil {
		release()
		return nil, kept, nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return process, kept, release, nil
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

// OpenAttach connects to a running container's own input and output, for a client's session.
// terminal must match the container's config. Stdin is ignored if the container was created without
// stdin, as in containerd and CRI-O. Without any stream the connection is nil.
//
// The caller owns the connection, and calls release after the session. The error is NotFound,
// FailedPrecondition if the container is not running, or InvalidArgument if terminal does not
// match.
func (s *Service) OpenAttach(ctx context.Context, id string, terminal, stdin, stdout, stderr bool) (
	conn *running.Attached, target copying.Target, release func(), err error) {
	c, err := s.attachTarget(id, terminal)
	if err != nil {
		return nil, target, nil, err
	}
	release, err = s.beginAttach(c, limited)
	if err != nil {
		return nil, target, nil, err
	}
	if terminal {
		err = s.holds.check(c.String())
	}
	if wants, any := c.Wants(stdin, stdout, stderr); any && err == nil {
		conn, err = shim.OpenMonitor(s.node.Shim(c.ID)).OpenAttach(ctx, wants)
	}
	if err != nil {
		release()
		return nil, target, nil, fmt.Errorf("container %s: %w", c.ID, err)
	}
	return conn, c.Target, release, nil
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

// DialPort connects to a TCP port on the localhost of a pod, IPv4 first, for a client's session.
// The caller owns the connection, and calls release after the session.
//
// Errors: NotFound; InvalidArgument for an invalid port; Unavailable if the port refuses the
// connection. FailedPrecondition if the pod is not ready, or the host cannot reach its localhost.
func (s *Service) DialPort(ctx context.Context, podID string, port int32) (
	conn *net.TCPConn, release func(), err error) {
	pod, err := s.forwardTarget(podID)
	if err != nil {
		return nil, nil, err
	}
	if port < 1 || port > 65535 {
		return nil, nil, errdefs.InvalidArgument("forward a port of pod sandbox %s: invalid port %d", pod.ID, port)
	}
	release, err = s.beginForward(pod, limited)
	if err != nil {
		return nil, nil, err
	}
	conn, err = s.dials.dial(ctx, pod.ID, pod.NetNS, uint16(port))
	if err == nil {
		return conn, release, nil
	}
	release()
	if pod.Sandboxed && errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil, errdefs.FailedPrecondition(
			"forward port %d of pod sandbox %s: the host cannot reach the localhost inside its runtime's sandbox", port, pod.ID)
	}
	return nil, nil, fmt.Errorf("forward port %d of pod sandbox %s: %w", port, pod.ID, err)
}
