package cni

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
)

// Strays are processes that a plugin started and left: its process group is killed when it
// hangs, but a child may have a group of its own, and when the daemon is killed only the plugin itself
// goes with it. Each run of a plugin has an ID of its own, which its children inherit in their
// environment, and, while it lasts, a file of that name. So the next daemon finds the runs that
// did not end, and their processes, wherever they are by then. A child that empties its
// environment is not found. Children of a run that ended by itself, well or not, are what the
// plugin wanted, and stay.

// runVar is the variable that carries the ID of a run.
const runVar = "BERTH_CNI_RUN"

// strayLimit bounds how long processes that were killed are waited for.
const strayLimit = 5 * time.Second

// runs is where the plugins that run are noted.
type runs struct {
	dir string // private, gone after a reboot; empty: they are not noted
	log *slog.Logger
}

// begin notes a run and returns its ID. Where there is no room to note it the error says so; whether to
// run all the same is the caller's decision.
func (r runs) begin(what string) (id string, err error) {
	id = rand.Text()
	if r.dir == "" {
		return id, nil
	}
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return id, fmt.Errorf("note that a CNI plugin runs: %w", err)
	}
	if err := os.WriteFile(filepath.Join(r.dir, id), []byte(what+"\n"), 0o600); err != nil {
		return id, fmt.Errorf("note that a CNI plugin runs: %w", err)
	}
	return id, nil
}

// end forgets a run. One that did not end by itself is remembered as long as it has processes.
func (r runs) end(id string, byItself bool) {
	if !byItself {
		ctx, cancel := context.WithTimeout(context.Background(), strayLimit)
		defer cancel()
		if err := killStrays(ctx, id); err != nil {
			r.log.Error("kill what a CNI plugin started", "run", id, "error", err)
			return
		}
	}
	r.forget(id)
}

func (r runs) forget(id string) {
	if r.dir == "" {
		return
	}
	if err := os.Remove(filepath.Join(r.dir, id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.log.Warn("forget that a CNI plugin ran", "run", id, "error", err)
	}
}

// endAll ends what plugins of an earlier daemon left when that was killed: what they did after a DEL
// would never be undone. The error names what does not end; the next daemon looks for it again.
func (r runs) endAll(ctx context.Context) error {
	if r.dir == "" {
		return nil
	}
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return fmt.Errorf("read directory: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, strayLimit)
	defer cancel()
	var errs []error
	for _, e := range entries {
		if err := killStrays(ctx, e.Name()); err != nil {
			errs = append(errs, fmt.Errorf("run %s of a CNI plugin: %w", e.Name(), err))
			continue
		}
		r.forget(e.Name())
	}
	return errors.Join(errs...)
}

// killStrays kills the processes of a run and looks again until there are none: they may be forking.
func killStrays(ctx context.Context, id string) error {
	for delay := time.Millisecond; ; delay = min(2*delay, 100*time.Millisecond) {
		left, err := signalStrays([]byte(runVar + "=" + id))
		if err != nil {
			return err
		}
		if len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v do not end: %w", left, ctx.Err())
		case <-time.After(delay):
		}
	}
}

// signalStrays kills the processes with a variable and returns their IDs.
func signalStrays(variable []byte) (pids []int, err error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := proc.Readdirnames(-1)
	if err := errors.Join(err, proc.Close()); err != nil {
		return nil, err
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() || !hasVariable(name, variable) {
			continue
		}
		if err := killIf(pid, func() bool { return hasVariable(name, variable) }); err != nil {
			return pids, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// killIf kills a process of which a condition is true. The pidfd is opened before that is asked, so
// that its ID cannot have come to mean another one.
func killIf(pid int, condition func() bool) error {
	process, err := pidfd.Open(pid)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return err
	}
	if condition() {
		err = pidfd.Signal(process, unix.SIGKILL)
	}
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	return errors.Join(err, process.Close())
}

// hasVariable reads the environment a process was started with; zombies have none. Who is gone, or
// hides his environment even from root, is not one of ours.
func hasVariable(pid string, variable []byte) bool {
	environ, err := os.ReadFile("/proc/" + pid + "/environ")
	if err != nil {
		return false
	}
	for kv := range bytes.SplitSeq(environ, []byte{0}) {
		if bytes.Equal(kv, variable) {
			return true
		}
	}
	return false
}
