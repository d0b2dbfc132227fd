package cni

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
)

// Each run of a plugin has a cgroup of its own, below the daemon's, which whatever it starts is in.
// A note in a private directory names the cgroup from before it is made until it is removed, so
// that the next daemon finds the runs that did not end. It lets them end by themselves, for a
// while, and then kills the cgroup: a DEL that is killed half-way may not be able to go on where it
// was (the bridge plugin finds the rules it made by the addresses of the link that it deletes
// first). Children of a run that ended by itself, well or not, are what the plugin wanted: the note
// says so by its name, nobody kills them, and the cgroup is removed when a later run ends, or a
// daemon starts, after they have ended. Nothing is read of the processes themselves: what /proc
// tells of a process can be as large as that process likes.

const (
	runPrefix = "berth-cni-" // begins the names of cgroups and notes
	overMark  = ".over"      // ends the names of notes of runs that ended by themselves

	killLimit   = 5 * time.Second // for processes that were killed
	leftLimit   = 5 * time.Second // for plugins of a daemon that was killed to end by themselves
	removeLimit = time.Second     // for the cgroup of processes that have ended
	removeOnce  = 16              // cgroups of earlier runs that one run tries to remove at most
)

// runs is where the plugins that run are noted.
type runs struct {
	dir    string           // private, gone after a reboot; empty: nothing is noted, and plugins have no cgroups
	prefix string           // begins the names of its cgroups and notes
	groups *cgroup.Children // nil: as found when the daemon started, there is no place for them
	absent error            // why groups is nil
	log    *slog.Logger

	mu   sync.Mutex // guards over
	over []run      // ended by themselves and have left processes, oldest first
}

// run is one execution of a plugin.
type run struct {
	name  string // of its note and its cgroup
	group string // the cgroup's directory; empty: it has none
}

func newRuns(dir string, log *slog.Logger) *runs {
	r := &runs{dir: dir, log: log}
	if dir == "" {
		return r
	}
	if r.absent = os.MkdirAll(dir, 0o700); r.absent != nil {
		return r
	}
	if r.prefix, r.absent = prefixOf(dir); r.absent == nil {
		r.groups, r.absent = cgroup.FindChildren()
	}
	return r
}

// prefixOf returns how the names of cgroups begin whose runs are noted in a directory. It tells
// those of several daemons apart, in whatever mount namespace each has its directory.
func prefixOf(dir string) (string, error) {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return "", &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	return fmt.Sprintf("%s%x-%x-", runPrefix, s.Dev, s.Ino), nil
}

// begin notes a run and makes its cgroup. If that fails nothing is left of both, and the caller
// decides whether the plugin runs without a cgroup.
func (r *runs) begin(what string) (run, error) {
	if r.dir == "" {
		return run{}, nil
	}
	if r.groups == nil {
		return run{}, fmt.Errorf("make a cgroup for a CNI plugin: %w", r.absent)
	}
	name := r.prefix + rand.Text()
	this := run{name: name, group: r.groups.Dir(name)}
	if err := r.note(this, what); err != nil {
		r.forget(this)
		return run{}, fmt.Errorf("note that a CNI plugin runs: %w", err)
	}
	failpoint.Reach("cni.make-group")
	if err := os.Mkdir(this.group, 0o755); err != nil {
		r.forget(this)
		return run{}, fmt.Errorf("make a cgroup for a CNI plugin: %w", err)
	}
	failpoint.Reach("cni.group-made")
	return this, nil
}

// note writes the note of a run: the path of its cgroup, and what runs, for people.
func (r *runs) note(this run, what string) error {
	failpoint.Reach("cni.note-run")
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return err
	}
	failpoint.Reach("cni.place-of-runs-made")
	err := os.WriteFile(filepath.Join(r.dir, this.name), []byte(this.group+"\n"+what+"\n"), 0o600)
	failpoint.Reach("cni.run-noted")
	return err
}

// start starts the plugin in the cgroup of its run.
func (r *runs) start(this run, cmd *exec.Cmd) error {
	if this.group == "" {
		return cmd.Start()
	}
	return r.groups.Start(cmd, this.group)
}

// end removes the cgroup of a run. If the run did not end by itself, end kills what it has left.
// The note of a cgroup that cannot be emptied stays, so that the next daemon tries again. Processes
// that a run left when it ended by itself are kept.
func (r *runs) end(this run, byItself bool) {
	if this.group == "" {
		return
	}
	if !byItself {
		if err := killAndRemove(this.group, time.Now().Add(killLimit)); err != nil {
			r.log.Error("kill what a CNI plugin started", "cgroup", this.group, "error", err)
			return
		}
		r.forget(this)
		return
	}
	switch err := cgroup.RemoveChild(this.group); {
	case err == nil:
		r.forget(this)
	case errors.Is(err, unix.EBUSY):
		r.keep(this)
	default:
		r.log.Error("remove the cgroup of a CNI plugin", "error", err)
	}
	r.removeOver()
}

// keep notes that a run has ended by itself and left processes.
func (r *runs) keep(this run) {
	failpoint.Reach("cni.keep-run")
	err := os.Rename(filepath.Join(r.dir, this.name), filepath.Join(r.dir, this.name+overMark))
	failpoint.Reach("cni.run-kept")
	if err != nil {
		r.log.Warn("note that a CNI plugin has left processes; the next daemon will kill them", "cgroup", this.group, "error", err)
	} else {
		this.name += overMark
	}
	r.mu.Lock()
	r.over = append(r.over, this)
	r.mu.Unlock()
}

// removeOver removes the cgroups of the earliest runs whose processes have ended meanwhile.
func (r *runs) removeOver() {
	r.mu.Lock()
	look := r.over[:min(len(r.over), removeOnce)]
	r.over = r.over[len(look):]
	r.mu.Unlock()
	var busy []run
	for _, this := range look {
		err := cgroup.RemoveChild(this.group)
		if err == nil {
			r.forget(this)
			continue
		}
		if !errors.Is(err, unix.EBUSY) {
			r.log.Error("remove the cgroup of a CNI plugin", "error", err)
		}
		busy = append(busy, this)
	}
	r.mu.Lock()
	r.over = append(r.over, busy...) // the others have their turn
	r.mu.Unlock()
}

func (r *runs) forget(this run) {
	failpoint.Reach("cni.forget-run")
	err := os.Remove(filepath.Join(r.dir, this.name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		r.log.Warn("forget that a CNI plugin ran", "run", this.name, "error", err)
	}
	failpoint.Reach("cni.run-forgotten")
}

// endAll waits for plugins of an earlier daemon, and kills what does not end by itself: what it did
// after a DEL would never be undone. The error names what does not end; the next daemon looks for
// it again. All of it takes leftLimit and killLimit, and some milliseconds for each run.
func (r *runs) endAll(ctx context.Context) error {
	if r.dir == "" {
		return nil
	}
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	running, err := r.read()
	if err != nil {
		return err
	}
	if err := untilEnded(ctx, running); err != nil {
		r.log.Warn("CNI plugins of an earlier daemon are killed", "error", err)
	}
	deadline := time.Now().Add(killLimit)
	var failed error
	for _, this := range running {
		if this.group != "" {
			if err := killAndRemove(this.group, deadline); err != nil {
				failed = errors.Join(failed, err)
				continue
			}
		}
		r.forget(this)
	}
	return failed
}

// read returns the runs that are noted as running. Runs that are over are forgotten once they have
// no processes.
func (r *runs) read() (running []run, err error) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, fmt.Errorf("read directory: %w", err)
	}
	for _, e := range entries {
		this := readRun(filepath.Join(r.dir, e.Name()))
		if !strings.HasSuffix(this.name, overMark) {
			running = append(running, this)
			continue
		}
		if this.group == "" || cgroup.RemoveChild(this.group) == nil {
			r.forget(this)
			continue
		}
		r.over = append(r.over, this)
	}
	return running, nil
}

// maxNote is more than a note has, in bytes.
const maxNote = 16 << 10

// readRun reads a note. One that its daemon did not write to the end has no cgroup yet, and that of
// an earlier version has none.
func readRun(path string) run {
	this := run{name: filepath.Base(path)}
	data, err := os.ReadFile(path) // written by us, in a private directory
	if err != nil || len(data) > maxNote {
		return this
	}
	group, _, whole := strings.Cut(string(data), "\n")
	name := strings.TrimSuffix(this.name, overMark)
	if whole && strings.HasPrefix(name, runPrefix) && filepath.IsAbs(group) && filepath.Base(group) == name {
		this.group = group
	}
	return this
}

// untilEnded waits until runs have no processes, or leftLimit is over. Of runs that an earlier
// version of berth noted, which had no cgroups, it cannot be known: they get all of the time.
func untilEnded(ctx context.Context, running []run) error {
	ctx, cancel := context.WithTimeout(ctx, leftLimit)
	defer cancel()
	for delay := time.Millisecond; ; delay = min(2*delay, 100*time.Millisecond) {
		var left []string
		for _, this := range running {
			busy := !strings.HasPrefix(this.name, runPrefix)
			if this.group != "" {
				var err error
				if busy, err = cgroup.HasProcesses(this.group); err != nil {
					return err
				}
			}
			if busy {
				left = append(left, this.name)
			}
		}
		if len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d do not end, the first is %s: %w", len(left), left[0], ctx.Err())
		case <-time.After(delay):
		}
	}
}

// killAndRemove kills all that is in a run's cgroup, at least once, and removes the cgroup. The
// kernel calls it busy for a moment after the last process was killed.
func killAndRemove(group string, deadline time.Time) error {
	failpoint.Reach("cni.kill-group")
	if err := cgroup.KillChild(group, time.Until(deadline)); err != nil {
		return err
	}
	failpoint.Reach("cni.group-killed")
	end := time.Now().Add(removeLimit)
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		err := cgroup.RemoveChild(group)
		if err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
		time.Sleep(delay)
	}
}

// NotedRuns tells which cgroups of plugins' runs are noted in a Config's RunDir, whether a Network
// is open there or not.
type NotedRuns struct {
	prefix string
	names  map[string]bool
}

// ReadNotedRuns reads them. A directory that does not exist has none.
func ReadNotedRuns(runDir string) (NotedRuns, error) {
	entries, err := os.ReadDir(runDir)
	if errors.Is(err, fs.ErrNotExist) {
		return NotedRuns{}, nil
	}
	if err != nil {
		return NotedRuns{}, fmt.Errorf("read notes of CNI plugins: %w", err)
	}
	noted := NotedRuns{names: map[string]bool{}}
	if noted.prefix, err = prefixOf(runDir); err != nil {
		return NotedRuns{}, err
	}
	for _, e := range entries {
		noted.names[strings.TrimSuffix(e.Name(), overMark)] = true
	}
	return noted, nil
}

// Prefix begins the names of the cgroups.
func (n NotedRuns) Prefix() string { return n.prefix }

// Unnoted returns the run that a cgroup's path belongs to if that run is this daemon's and has no
// note; else it returns "".
func (n NotedRuns) Unnoted(group string) string {
	for part := range strings.SplitSeq(group, "/") {
		if n.prefix != "" && strings.HasPrefix(part, n.prefix) && !n.names[part] {
			return part
		}
	}
	return ""
}
