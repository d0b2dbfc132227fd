package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/oci"
	"berth/sandbox/session"
	"berth/shim"
)

// ExecSync runs a command in a container and returns its output and exit code.
// Zero timeout means no limit but ctx's. When the time is over the command and all it started
// are killed, and the error is DeadlineExceeded.
//
// The end of the command is its exit, not the end of its output: what it leaves
// running in the background with its stdout is not waited for.
func (m *Manager) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*session.Result, error) {
	c, err := m.execTarget(id, command)
	if err != nil {
		return nil, err
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	end := m.tasks.BeginOpen
	if timeout > 0 {
		end = func(what, object string) func() { return m.tasks.BeginUpTo(timeout, what, object) }
	}
	defer end("the end of an exec", c.String())()
	result, err := m.sessions().ExecSync(ctx, m.execRequest(c, command, false))
	if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
		return nil, errdefs.DeadlineExceeded("exec in container %s: %q did not end within %v", c.id, command, timeout)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.id, err)
	}
	return result, nil
}

// sessions runs sessions for the time of an operation.
func (m *Manager) sessions() session.Runner {
	return session.Runner{Launchers: m.launchers, Spawn: m.tasks.Operations.Spawn}
}

func (m *Manager) execRequest(c *container, command []string, terminal bool) shim.ExecRequest {
	return shim.ExecRequest{ID: c.id, Runtime: m.runtimeOf(c), Dir: m.dirs.Shim(c.id), ExecID: newID()[:16],
		Process: oci.ExecProcess(&specs.Spec{Process: c.info.Load().process}, command, terminal)}
}

// CheckExec tells whether Exec would find a container to run a command in, and
// returns its full ID. Errors: as Exec's.
func (m *Manager) CheckExec(id string, command []string) (string, error) {
	c, err := m.execTarget(id, command)
	if err != nil {
		return "", err
	}
	return c.id, nil
}

func (m *Manager) execTarget(id string, command []string) (*container, error) {
	c, err := m.runningContainer("exec in", id)
	if err != nil {
		return nil, err
	}
	if len(command) == 0 || command[0] == "" {
		return nil, errdefs.InvalidArgument("exec in container %s: the command is empty", c.id)
	}
	return c, nil
}

// runningContainer finds a container in which something can be done now. Errors:
// NotFound, FailedPrecondition if it is not running.
func (m *Manager) runningContainer(what, id string) (*container, error) {
	c, err := m.containers.Find(id)
	if err != nil {
		return nil, err
	}
	if run := c.running.Load(); run == nil || run.HasEnded() {
		return nil, errdefs.FailedPrecondition("%s container %s: it is not running", what, c.id)
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
func (m *Manager) Exec(ctx context.Context, id string, command []string, terminal bool, s session.Streams) (int32, error) {
	c, err := m.execTarget(id, command)
	if err != nil {
		return 0, err
	}
	defer m.tasks.BeginOpen("the end of an exec", c.String())()
	code, err := m.sessions().Exec(ctx, m.execRequest(c, command, terminal), s)
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", c.id, err)
	}
	return code, nil
}

// CheckAttach tells whether Attach would find a container to attach to, and returns
// its full ID. Errors: as Attach's.
func (m *Manager) CheckAttach(id string, terminal bool) (string, error) {
	c, err := m.attachTarget(id, terminal)
	if err != nil {
		return "", err
	}
	return c.id, nil
}

func (m *Manager) attachTarget(id string, terminal bool) (*container, error) {
	c, err := m.runningContainer("attach to", id)
	if err != nil {
		return nil, err
	}
	if has := c.config.GetTty(); has != terminal {
		return nil, errdefs.InvalidArgument("attach to container %s: tty is %t, but the container was made with tty %t", c.id, terminal, has)
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
func (m *Manager) Attach(ctx context.Context, id string, terminal bool, s session.Streams) error {
	c, err := m.attachTarget(id, terminal)
	if err != nil {
		return err
	}
	defer m.tasks.BeginOpen("the end of an attached session", c.String())()
	if err := m.sessions().Attach(ctx, shim.OpenMonitor(m.dirs.Shim(c.id)), terminal, c.config.GetStdin(), s); err != nil {
		return fmt.Errorf("container %s: %w", c.id, err)
	}
	return nil
}

// CheckPortForward tells whether PortForward would find a pod, and returns its full
// ID. Errors: as PortForward's.
func (m *Manager) CheckPortForward(podID string) (string, error) {
	pod, err := m.forwardTarget(podID)
	if err != nil {
		return "", err
	}
	return pod.ID, nil
}

func (m *Manager) forwardTarget(podID string) (*PodInfo, error) {
	pod, err := m.Pod(podID)
	if err != nil {
		return nil, err
	}
	if !pod.Ready {
		return nil, errdefs.FailedPrecondition("forward a port of pod sandbox %s: it is not ready", pod.ID)
	}
	return pod, nil
}

// PortForward connects a client to a TCP port that a pod's processes listen on at
// their localhost, IPv4 first, until both sides have ended, one of them fails, or ctx
// ends. Each side may close its direction and go on in the other (stream.Close closes
// the one to the client).
//
// When it fails a Read from stream that is under way is not waited for: the caller
// closes the stream.
//
// Errors: NotFound, FailedPrecondition if the pod is not ready, InvalidArgument for no
// port, Unavailable if nothing listens there.
func (m *Manager) PortForward(ctx context.Context, podID string, port int32, stream io.ReadWriteCloser) error {
	pod, err := m.forwardTarget(podID)
	if err != nil {
		return err
	}
	if port < 1 || port > 65535 {
		return errdefs.InvalidArgument("forward a port of pod sandbox %s: %d is no port", pod.ID, port)
	}
	defer m.tasks.BeginOpen("the end of a forwarded connection", "pod "+pod.ID)()
	if err := m.sessions().Forward(ctx, pod.NetNS, uint16(port), stream); err != nil {
		return fmt.Errorf("forward port %d of pod sandbox %s: %w", port, pod.ID, err)
	}
	return nil
}
