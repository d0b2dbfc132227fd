package attacks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
	"berth/internal/testutil"
)

// A cancelled attach leaves no goroutine.
func TestCVE_2025_64329_AttachAndCancel(t *testing.T) {
	testutil.Long(t)
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.WithStdin(false))
	monitor := harness.MonitorOf(t, d, c)
	rounds := 10000
	if testing.Short() {
		rounds = 500
	}
	attachAndCancel := func(n int) {
		const together = 20
		var running sync.WaitGroup
		errs := make(chan error, together)
		for i := range together {
			running.Go(func() {
				for range n / together {
					if err := attachOnce(t.Context(), d, c, sessions.Protocols[i%len(sessions.Protocols)]); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		running.Wait()
		close(errs)
		for err := range errs {
			t.Fatal(err)
		}
	}
	attachAndCancel(100) // creates everything that is created only once
	count := func() map[string]int {
		return map[string]int{"daemon's goroutines": d.Goroutines(t), "daemon's descriptors": machine.CountFiles(t, d.Cmd.Process.Pid, "fd"), "monitor's descriptors": machine.CountFiles(t, monitor, "fd"),
			"monitor's threads": machine.CountFiles(t, monitor, "task")}
	}
	var before map[string]int
	harness.Eventually(t, "sessions of the warm-up are gone", func() error {
		before = count()
		return machine.SessionsLeft(monitor)
	})
	attachAndCancel(rounds)
	harness.Eventually(t, "cancelled sessions leave nothing", func() error {
		var err error
		for what, n := range count() {
			if n > before[what] {
				err = errors.Join(err, fmt.Errorf("%s: %d, before %d", what, n, before[what]))
			}
		}
		return errors.Join(err, machine.SessionsLeft(monitor))
	})
}

// attachOnce attaches to a container and disconnects after a random time.
func attachOnce(ctx context.Context, d *harness.Daemon, c *harness.Container, p sessions.Protocol) error {
	response, err := d.Cri.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: c.Id, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return err
	}
	ctx, hangUp := context.WithCancel(ctx)
	input := &hangingUp{hangUp}
	_, err = p.Stream(ctx, sessions.Plain(), response.Url, remotecommand.StreamOptions{Stdin: input, Stdout: io.Discard, Stderr: io.Discard})
	if !errors.Is(err, context.Canceled) {
		return fmt.Errorf("cancelled attach: %w", err)
	}
	return nil
}

// hangingUp is an input that cancels the session when it is read.
type hangingUp struct{ hangUp context.CancelFunc }

func (h *hangingUp) Read([]byte) (int, error) {
	h.hangUp()
	return 0, io.EOF
}
