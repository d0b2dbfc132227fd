package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

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
	c, err := m.execTarget(id, command)
	if err != nil {
		return nil, err
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
	stdout, stderr := capped{limit: maxExecOutput}, capped{limit: maxExecOutput}
	defer m.tasks.Begin("the end of an exec", c.String())()
	code, err := m.execPipes(ctx, m.execRequest(c, command, false), Streams{Stdout: &stdout, Stderr: &stderr})
	if err != nil {
		return nil, err
	}
	return &ExecResult{ExitCode: code, Stdout: stdout.data, Stderr: stderr.data}, nil
}

func (m *Manager) execRequest(c *container, command []string, terminal bool) shim.ExecRequest {
	return shim.ExecRequest{ID: c.id, Runtime: m.runtimeOf(c), Dir: m.shimDir(c.id), ExecID: newID()[:16],
		Process: oci.ExecProcess(&specs.Spec{Process: c.info.Load().process}, command, terminal)}
}
