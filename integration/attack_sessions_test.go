package integration

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Each attach that was given up left a goroutine.
func TestCVE_2025_64329_AttachAndCancel(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t, withStdin(false))
	monitor := monitorOf(t, d, c)
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
					if err := attachOnce(t.Context(), d, c, protocols[i%len(protocols)]); err != nil {
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
	attachAndCancel(100) // what is made once
	count := func() map[string]int {
		return map[string]int{"daemon's goroutines": d.goroutines(t), "daemon's descriptors": countFiles(t, d.cmd.Process.Pid, "fd"), "monitor's descriptors": countFiles(t, monitor, "fd"),
			"monitor's threads": countFiles(t, monitor, "task")}
	}
	var before map[string]int
	eventually(t, "the first ones are gone", func() error {
		before = count()
		return sessionsLeft(monitor)
	})
	attachAndCancel(rounds)
	eventually(t, "nothing is left", func() error {
		var err error
		for what, n := range count() {
			if n > before[what] {
				err = errors.Join(err, fmt.Errorf("%s: %d, before %d", what, n, before[what]))
			}
		}
		return errors.Join(err, sessionsLeft(monitor))
	})
}

// attachOnce attaches to a container and hangs up, some time in between.
func attachOnce(ctx context.Context, d *daemon, c *container, p protocol) error {
	response, err := d.cri.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: c.id, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return err
	}
	ctx, hangUp := context.WithCancel(ctx)
	input := &hangingUp{hangUp}
	_, err = p.stream(ctx, plain(), response.Url, remotecommand.StreamOptions{Stdin: input, Stdout: io.Discard, Stderr: io.Discard})
	if !errors.Is(err, context.Canceled) {
		return fmt.Errorf("an attach that was given up: %w", err)
	}
	return nil
}

// hangingUp is input that hangs up when it is asked for.
type hangingUp struct{ hangUp context.CancelFunc }

func (h *hangingUp) Read([]byte) (int, error) {
	h.hangUp()
	return 0, io.EOF
}

// monitorOf returns the process ID of a container's monitor.
func monitorOf(t *testing.T, d *daemon, c *container) int {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(d.state, "c", c.id, "shim"))
	must(t, err)
	var pid int
	_, err = fmt.Sscan(string(data), &pid)
	must(t, err)
	return pid
}

// sessionsLeft tells whether a monitor has clients.
func sessionsLeft(monitor int) error {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", monitor))
	if err != nil {
		return err
	}
	sockets := 0
	for _, e := range entries {
		if target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", monitor, e.Name())); err == nil && strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	if sockets != 1 { // the one it listens at
		return fmt.Errorf("the monitor has %d sockets", sockets)
	}
	return nil
}

func countFiles(t *testing.T, pid int, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, dir))
	must(t, err)
	return len(entries)
}
