package checkpoint

import (
	"context"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/integration/harness"
	"berth/integration/machine"
)

// A cancelled checkpoint makes CRIU fail, so that CRIU restores the processes that it has changed.
// A kill would leave a process at CRIU's instructions. CRIU is stopped while it holds the
// container, so it sees the cancellation in the middle of its work.
func TestCancelledCheckpointIsAborted(t *testing.T) {
	d := startDaemon(t)
	pod, list := run(t, d, "one")
	pid := list[0].Pid(t)
	dir := outputDir(t, d)
	var criu int
	var cancel context.CancelFunc
	var ended <-chan error
	harness.EventuallyTrue(t, "CRIU is stopped while it holds the container", func() bool {
		var ctx context.Context
		ctx, cancel = context.WithCancel(t.Context())
		ended = harness.Go(func() error {
			_, err := harness.RawRuntime(t, d).CheckpointPod(ctx, podRequest(pod, dir, list...))
			return err
		})
		if criu = stoppedTracer(t, pid, ended); criu != 0 {
			return true
		}
		cancel()
		dir = outputDir(t, d) // the checkpoint was faster
		return false
	})
	cancel()
	harness.EventuallyTrue(t, "CRIU cannot write", func() bool {
		var limit unix.Rlimit
		return unix.Prlimit(criu, unix.RLIMIT_FSIZE, nil, &limit) == nil && limit.Max == 0
	})
	harness.Must(t, unix.Kill(criu, unix.SIGCONT))
	harness.WantCode(t, <-ended, codes.Canceled)
	harness.EventuallyTrue(t, "CRIU has ended", func() bool { return len(criuPIDs()) == 0 })
	goesOn(t, list[0])
	isEmpty(t, dir)
	harness.Must(t, checkpointPod(t, pod, outputDir(t, d), list...))
}

// stoppedTracer stops the process that traces pid, and returns it. It returns 0 if the checkpoint
// ends before.
func stoppedTracer(t *testing.T, pid int, ended <-chan error) (tracer int) {
	t.Helper()
	for {
		select {
		case <-ended:
			return 0
		default:
		}
		harness.Get(fmt.Sscan(machine.StatusField(t, pid, "TracerPid"), &tracer))(t)
		if tracer != 0 && unix.Kill(tracer, unix.SIGSTOP) == nil {
			return tracer
		}
	}
}
