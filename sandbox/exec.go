package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/oci"
	"berth/shim"
)

// maxExecOutput is what ExecSync returns of each stream; the rest is discarded
// without error (CRI: "the runtime should cap").
const maxExecOutput = 16 << 20

// ExecResult is what a command left.
type ExecResult struct {
	Stdout, Stderr []byte
	ExitCode       int32
}

// ExecSync runs a command in a container and returns its output and exit code.
// Zero timeout means no limit but ctx's. When the time is over the command and all it started
// are killed, and the error is DeadlineExceeded.
//
// The end of the command is its exit, not the end of its output: what it leaves
// running in the background with its stdout is not waited for.
func (m *Manager) ExecSync(ctx context.Context, id string, command []string, timeout time.Duration) (*ExecResult, error) {
	c, err := m.containers.find(id)
	if err != nil {
		return nil, err
	}
	if len(command) == 0 || command[0] == "" {
		return nil, errdefs.InvalidArgument("exec in container %s: the command is empty", c.id)
	}
	run := c.running.Load()
	if run == nil {
		return nil, errdefs.FailedPrecondition("exec in container %s: it is not running", c.id)
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	result, err := m.exec(ctx, c, command)
	if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
		return nil, errdefs.DeadlineExceeded("exec in container %s: %q did not end within %v", c.id, command, timeout)
	}
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.id, err)
	}
	return result, nil
}

func (m *Manager) exec(ctx context.Context, c *container, command []string) (*ExecResult, error) {
	stdout, err := newCollector()
	if err != nil {
		return nil, err
	}
	defer stdout.close()
	stderr, err := newCollector()
	if err != nil {
		return nil, err
	}
	defer stderr.close()
	defer m.tasks.Begin("the end of an exec", c.String())()
	process, err := m.launchers.Exec(ctx, shim.ExecRequest{ID: c.id, ExecID: newID()[:16],
		Process: oci.ExecProcess(&specs.Spec{Process: c.info.Load().process}, command, false), Stdout: stdout.w, Stderr: stderr.w})
	if err != nil {
		return nil, err
	}
	code, err := process.Wait(ctx)
	if err := errors.Join(err, process.Close()); err != nil { // Close kills what has not ended
		return nil, err
	}
	result := &ExecResult{ExitCode: code}
	if result.Stdout, err = stdout.finish(); err != nil {
		return nil, err
	}
	if result.Stderr, err = stderr.finish(); err != nil {
		return nil, err
	}
	return result, nil
}

// collector reads one output stream of a command into memory, up to a limit.
type collector struct {
	r, w *os.File
	done chan struct{} // closed when the reading goroutine has ended
	once sync.Once
	data []byte
	err  error
}

func newCollector() (*collector, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	// Only the reading end is non-blocking: the writing end is the command's.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, errors.Join(fmt.Errorf("make pipe: %w", err), unix.Close(fds[0]), unix.Close(fds[1]))
	}
	c := &collector{r: os.NewFile(uintptr(fds[0]), "exec output"), w: os.NewFile(uintptr(fds[1]), "exec output"), done: make(chan struct{})}
	go c.collect() // ends by finish or close, which wait for it
	return c, nil
}

func (c *collector) collect() {
	defer close(c.done)
	buf := make([]byte, 32<<10)
	for {
		n, err := c.r.Read(buf)
		c.keep(buf[:n])
		if err != nil {
			if err != io.EOF && !errors.Is(err, os.ErrDeadlineExceeded) {
				c.err = fmt.Errorf("read output of the command: %w", err)
			}
			return
		}
	}
}

func (c *collector) keep(data []byte) {
	c.data = append(c.data, data[:min(len(data), maxExecOutput-len(c.data))]...)
}

// stop ends the reading goroutine.
func (c *collector) stop() {
	c.once.Do(func() {
		if err := c.r.SetReadDeadline(time.Unix(1, 0)); err != nil {
			c.err = fmt.Errorf("stop reading output: %w", err)
			_ = c.r.Close() // ends the read for certain
		}
		<-c.done
	})
}

// finish returns all output that was written before the command exited: what the
// goroutine has read, and what is in the pipe still. Whoever else has the pipe
// open is not waited for.
func (c *collector) finish() ([]byte, error) {
	c.stop()
	if c.err != nil {
		return nil, c.err
	}
	conn, err := c.r.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("read output of the command: %w", err)
	}
	var readErr error
	buf := make([]byte, 64<<10)
	err = conn.Control(func(fd uintptr) {
		// A pipe holds 64 KiB by default, 1 MiB at most (fs.pipe-max-size):
		// a background process that goes on writing cannot keep us here.
		for left := 1 << 20; left > 0; {
			n, err := unix.Read(int(fd), buf)
			if err == unix.EINTR {
				continue
			}
			if err != nil && err != unix.EAGAIN {
				readErr = err
			}
			if n <= 0 {
				return
			}
			c.keep(buf[:n])
			left -= n
		}
	})
	if err := errors.Join(err, readErr); err != nil {
		return nil, fmt.Errorf("read output of the command: %w", err)
	}
	return c.data, nil
}

func (c *collector) close() {
	c.stop()
	_ = c.r.Close() // nothing to lose
	_ = c.w.Close()
}
