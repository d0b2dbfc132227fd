package cni

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
)

// Strays are plugins that outlive their daemon, and processes that a plugin started and left: its
// process group is killed when it hangs, but a child may have a group of its own. Each run of a plugin has an ID of its own, which its children inherit in their
// environment, and, while it lasts, a file of that name. So the next daemon finds the runs that
// did not end, and their processes, wherever they are by then. It lets them end by themselves, for a
// while: a DEL that is killed half-way may not be able to go on where it was (the bridge plugin finds the
// rules it made by the addresses of the link that it deletes first). A child that empties its
// environment is not found. Children of a run that ended by itself, well or not, are what the
// plugin wanted, and stay.

// runVar is the variable that carries the ID of a run.
const runVar = "BERTH_CNI_RUN"

const (
	strayLimit = 5 * time.Second // for processes that were killed
	leftLimit  = 5 * time.Second // for plugins of a daemon that was killed to end by themselves
)

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
	failpoint.Reach("cni.note-run")
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return id, fmt.Errorf("note that a CNI plugin runs: %w", err)
	}
	failpoint.Reach("cni.place-of-runs-made")
	if err := os.WriteFile(filepath.Join(r.dir, id), []byte(what+"\n"), 0o600); err != nil {
		return id, fmt.Errorf("note that a CNI plugin runs: %w", err)
	}
	failpoint.Reach("cni.run-noted")
	return id, nil
}

// end forgets a run. One that did not end by itself is remembered as long as it has processes.
func (r runs) end(id string, byItself bool) {
	if !byItself {
		if err := killStrays(context.Background(), id); err != nil {
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
	failpoint.Reach("cni.forget-run")
	err := os.Remove(filepath.Join(r.dir, id))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		r.log.Warn("forget that a CNI plugin ran", "run", id, "error", err)
	}
	failpoint.Reach("cni.run-forgotten")
}

// endAll waits for what plugins of an earlier daemon left when that was killed, and kills what does not end by itself: what
// it did after a DEL would never be undone. The error names what does not end; the next daemon looks for it again.
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
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	if len(ids) == 0 {
		return nil
	}
	if err := untilNone(ctx, leftLimit, func() ([]int, error) { return strays(ids) }); err != nil {
		r.log.Warn("CNI plugins of an earlier daemon are killed", "error", err)
	}
	if err := killStrays(ctx, ids...); err != nil {
		return err
	}
	for _, id := range ids {
		r.forget(id)
	}
	return nil
}

// killStrays kills the processes of runs and looks again until there are none: they may be forking.
func killStrays(ctx context.Context, ids ...string) error {
	return untilNone(ctx, strayLimit, func() ([]int, error) {
		pids, err := strays(ids)
		for _, pid := range pids {
			err = errors.Join(err, killIf(pid, func() bool { return belongs(pid, ids) }))
		}
		return pids, err
	})
}

// untilNone looks again and again, until there is no process any more.
func untilNone(ctx context.Context, limit time.Duration, look func() ([]int, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for delay := time.Millisecond; ; delay = min(2*delay, 100*time.Millisecond) {
		left, err := look()
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

// strays finds the processes of runs.
func strays(ids []string) (pids []int, err error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := proc.Readdirnames(-1)
	if err := errors.Join(err, proc.Close()); err != nil {
		return nil, err
	}
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid != os.Getpid() && belongs(pid, ids) {
			pids = append(pids, pid)
		}
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

// belongs reads the environment that a process was started with; zombies have none. Who is gone, or
// hides his environment even from root, is not one of ours.
func belongs(pid int, ids []string) bool {
	for kv := range strings.SplitSeq(environment("/proc/"+strconv.Itoa(pid)), "\x00") {
		if id, ok := strings.CutPrefix(kv, runVar+"="); ok {
			return slices.Contains(ids, id)
		}
	}
	return false
}

// execTime bounds the wait for a process to come out of execve.
const execTime = 100 * time.Millisecond

// environment returns what a process was started with, "" if it can't be read. In the middle of execve, between exec_mmap and
// create_elf_tables, the kernel has a program and neither arguments nor an environment to tell; without a program it has ended, or is the kernel's.
func environment(dir string) string {
	end := time.Now().Add(execTime)
	for empty := 0; ; {
		environ, err := os.ReadFile(dir + "/environ")
		if err != nil || len(environ) > 0 {
			return string(environ)
		}
		args, err := os.ReadFile(dir + "/cmdline")
		if err != nil {
			return ""
		}
		if len(args) > 0 { // it may have come out of execve meanwhile, and even be in the next
			if empty++; empty == 10 {
				return ""
			}
			continue
		}
		if _, err := os.Readlink(dir + "/exe"); err != nil || time.Now().After(end) {
			return ""
		}
		time.Sleep(50 * time.Microsecond)
	}
}
