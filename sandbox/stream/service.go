package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/fdquota"
	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// ContainerTarget is a container that a client can be connected to.
type ContainerTarget struct {
	ID       string
	PodID    string
	Process  *specs.Process      // what execs derive from
	Runtime  *ociruntime.Runtime // nil: libcontainer
	Cgroup   string              // its cgroup, as in a runtime-spec
	Terminal bool                // its own process has one
	Stdin    bool                // it takes input
	Running  bool
}

func (c ContainerTarget) String() string { return "container " + c.ID }

// pod is what counts for limits of pods.
func (c ContainerTarget) pod() PodTarget { return PodTarget{ID: c.PodID} }

// PodTarget is a pod that a client can be connected to.
type PodTarget struct {
	ID    string
	NetNS string // path; empty: the host's
	Ready bool

	Sandboxed bool // its runtime may have a network stack of its own
}

func (p PodTarget) String() string { return "pod " + p.ID }

// Targets finds containers and pods, as they are now, by ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several. It waits for nobody.
type Targets interface {
	StreamContainer(id string) (ContainerTarget, error)
	StreamPod(id string) (PodTarget, error)
}

// Service connects clients to containers and pods.
type Service struct {
	targets   Targets
	launchers *shim.Launchers
	dirs      state.Dirs
	systemd   bool         // cgroups are systemd's
	tasks     *task.Runner // sessions are among its Operations
	dials     *dialLimiter
	outputs   *outputBudget
	execs     *slots
	connected *slots // of the execs, those with a client
	attached  *slots // to containers and ports, of pods
}

// New returns what connects clients to these targets, whose cgroups are systemd's or not.
func New(targets Targets, launchers *shim.Launchers, dirs state.Dirs, systemd bool, limits Limits, tasks *task.Runner) *Service {
	s := &Service{targets: targets, launchers: launchers, dirs: dirs, systemd: systemd, tasks: tasks, dials: newDialLimiter(), outputs: &outputBudget{},
		execs:     newSlots("execs", limits.Execs, limits.ExecsPerContainer),
		connected: newSlots("exec sessions", limits.execSessions(), limits.ExecsPerContainer),
		attached:  newSlots("attached sessions and forwarded connections", limits.Sessions, limits.podSessions())}
	s.connected.spare, s.attached.spare = spareDescriptors, spareDescriptors
	return s
}

// spareDescriptors returns ResourceExhausted if a session would take descriptors that CRI and the
// daemon itself need.
func spareDescriptors() error {
	quota, err := fdquota.ForSessions()
	if err != nil {
		return err
	}
	return quota.Check()
}

// sessions runs sessions for the time of an operation.
func (s *Service) sessions() runner {
	return runner{Launchers: s.launchers, dials: s.dials, outputs: s.outputs, Spawn: s.tasks.Operations.Spawn}
}

// ExecSync runs a command in a container and returns its output and exit code.
// Zero timeout means no limit but ctx's. When the time is over the command and all it started
// are killed, and the error is DeadlineExceeded.
//
// The end of the command is its exit, not the end of its output: what it leaves
// running in the background with its stdout is not waited for.
func (s *Service) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*Result, error) {
	c, err := s.execTarget(id, command)
	if err != nil {
		return nil, err
	}
	release, err := s.execs.take(c.String())
	if err != nil {
		return nil, err
	}
	defer release()
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	end := s.tasks.BeginOpen
	if timeout > 0 {
		end = func(what, object string) func() { return s.tasks.BeginUpTo(timeout, what, object) }
	}
	defer end("the end of an exec", c.String())()
	result, err := s.sessions().ExecSync(ctx, s.execRequest(c, command, false))
	if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
		return nil, errdefs.DeadlineExceeded("exec in container %s: %q did not end within %v", c.ID, command, timeout)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return result, nil
}

func (s *Service) execRequest(c ContainerTarget, command []string, terminal bool) *proto.Exec {
	return &proto.Exec{ID: c.ID, Runtime: c.Runtime, Dir: s.dirs.Shim(c.ID), ExecID: state.NewID()[:16],
		CgroupsPath: c.Cgroup, SystemdCgroup: s.systemd,
		Process: oci.ExecProcess(&specs.Spec{Process: c.Process}, command, terminal)}
}

// CheckExec tells whether Exec would find a container to run a command in, and
// returns its full ID. Errors: as Exec's.
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
	return c, nil
}

// runningContainer finds a container in which something can be done now. Errors:
// NotFound, FailedPrecondition if it is not running.
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

// Exec runs a command in a container, connected to a client, and returns its exit
// code, 128+signal if a signal ended it. With terminal it runs in one of its own, of
// which Stdout is the output. The end of Stdin closes the command's stdin; a terminal
// has no such end.
//
// The session ends with the command, as with ExecSync: what it leaves running in the
// background is not waited for. When ctx ends, because the client is gone, or when
// Stdout or Stderr takes no more, the command and everything it has started are
// killed. (containerd and CRI-O let it run: nobody can reach it any more, and it stays
// for as long as the container. A command that is to outlive its client can be started
// in the background.)
//
// Errors: NotFound, FailedPrecondition if the container is not running,
// InvalidArgument for a command that can't be.
func (s *Service) Exec(ctx context.Context, id string, command []string, terminal bool, client IO) (int32, error) {
	c, err := s.execTarget(id, command)
	if err != nil {
		return 0, err
	}
	release, err := s.takeSession(c)
	if err != nil {
		return 0, err
	}
	defer release()
	defer s.tasks.BeginOpen("the end of an exec", c.String())()
	code, err := s.sessions().Exec(ctx, s.execRequest(c, command, terminal), client)
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.ID, err)
	}
	return code, nil
}

// CheckAttach tells whether Attach would find a container to attach to, and returns
// its full ID. Errors: as Attach's.
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
		return ContainerTarget{}, errdefs.InvalidArgument("attach to container %s: tty is %t, but the container was made with tty %t", c.ID, terminal, c.Terminal)
	}
	return c, nil
}

// Attach connects a client to a running container's own input and output, from now
// on, until the container ends or ctx does. terminal must be as in the container's
// config. Stdin is ignored if the container was made without stdin, as containerd and
// CRI-O do; its end closes the container's stdin if the config says StdinOnce.
//
// Errors: NotFound, FailedPrecondition if the container is not running,
// InvalidArgument if terminal does not match.
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
	defer s.tasks.BeginOpen("the end of an attached session", c.String())()
	if err := s.sessions().Attach(ctx, shim.OpenMonitor(s.dirs.Shim(c.ID)), terminal, c.Stdin, client); err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}

// CheckPortForward tells whether PortForward would find a pod, and returns its full
// ID. Errors: as PortForward's.
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

// PortForward connects a client to a TCP port that a pod's processes listen on at
// their localhost, IPv4 first, until both sides have ended, one of them fails, or ctx
// ends. Each side may close its direction and go on in the other (Close closes
// the one to the client).
//
// When it fails a Read from stream that is under way is not waited for: the caller
// closes the stream.
//
// Errors: NotFound, FailedPrecondition if the pod is not ready, or its processes can't be reached from the host, InvalidArgument for no
// port, Unavailable if nothing listens there.
func (s *Service) PortForward(ctx context.Context, podID string, port int32, stream io.ReadWriteCloser) error {
	pod, err := s.forwardTarget(podID)
	if err != nil {
		return err
	}
	if port < 1 || port > 65535 {
		return errdefs.InvalidArgument("forward a port of pod sandbox %s: %d is no port", pod.ID, port)
	}
	release, err := s.attached.take(pod.String())
	if err != nil {
		return err
	}
	defer release()
	defer s.tasks.BeginOpen("the end of a forwarded connection", pod.String())()
	err = s.sessions().Forward(ctx, pod.ID, pod.NetNS, uint16(port), stream)
	if pod.Sandboxed && errors.Is(err, unix.ECONNREFUSED) {
		return errdefs.FailedPrecondition("forward port %d of pod sandbox %s: its runtime's sandbox has a localhost of its own, which the host can't reach", port, pod.ID)
	}
	if err != nil {
		return fmt.Errorf("forward port %d of pod sandbox %s: %w", port, pod.ID, err)
	}
	return nil
}
