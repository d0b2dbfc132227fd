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

// Each run of a plugin has a cgroup below the daemon's, which also contains the plugin's children.
// A note in a private directory names the cgroup. The note is written before the cgroup's creation
// and removed after its removal, so the next daemon finds unfinished runs. It waits some seconds
// for them and then kills the processes in the cgroup. It waits because a DEL that is killed
// half-way may not be able to continue. For example, the bridge plugin deletes its link first, but
// needs the link's addresses to find its iptables rules.
//
// Children may outlive a plugin that exits. They are not killed. The note's suffix then marks the
// run as over, and a later run or daemon removes the cgroup once it is empty. This file does not
// read /proc/PID, because a process can make those files arbitrarily large.

const (
	runPrefix = "berth-cni-" // prefix of cgroups and notes
	overMark  = ".over"      // suffix of notes of runs whose plugin exited without being killed

	killTimeout   = 5 * time.Second // wait for killed processes to exit
	leftTimeout   = 5 * time.Second // wait for plugins of an earlier daemon to exit
	removeTimeout = time.Second     // wait for the removal of an empty cgroup
	removeOnce    = 16              // cgroups of earlier runs that one run tries to remove
)

// runs keeps the notes and cgroups of running plugins.
type runs struct {
	dir    string           // private, lost at a reboot; "": no notes and no cgroups
	prefix string           // prefix of this directory's cgroups and notes
	groups *cgroup.Children // nil: no cgroups, because the daemon could not create them when it started
	absent error            // the reason if groups is nil
	log    *slog.Logger

	mu sync.Mutex
	// +checklocks:mu
	over []run // runs whose plugins exited and left children, oldest first
}

// run is one execution of a plugin.
type run struct {
	name  string // name of the note and cgroup
	group string // path of the cgroup; "": none
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

// prefixOf returns the prefix of the names of cgroups whose notes are in dir. It identifies dir by
// device and inode, so that it differs between daemons and does not depend on the mount namespace.
func prefixOf(dir string) (string, error) {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return "", &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	return fmt.Sprintf("%s%x-%x-", runPrefix, s.Dev, s.Ino), nil
}

// begin writes the note of a run and creates its cgroup. After an error neither of them exists. The
// caller then decides whether the plugin runs without a cgroup.
func (r *runs) begin(what string) (run, error) {
	if r.dir == "" {
		return run{}, nil
	}
	if r.groups == nil {
		return run{}, fmt.Errorf("create a cgroup for a CNI plugin: %w", r.absent)
	}
	name := r.prefix + rand.Text()
	this := run{name: name, group: r.groups.Dir(name)}
	if err := r.note(this, what); err != nil {
		r.forget(this)
		return run{}, fmt.Errorf("write note of a CNI plugin run: %w", err)
	}
	failpoint.Reach("cni.make-group")
	if err := os.Mkdir(this.group, 0o755); err != nil {
		r.forget(this)
		return run{}, fmt.Errorf("create a cgroup for a CNI plugin: %w", err)
	}
	failpoint.Reach("cni.group-made")
	return this, nil
}

// note writes the note of a run: the path of its cgroup, and a description for the operator.
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

// end removes the cgroup of a run. If the plugin was killed, it also kills the plugin's children.
// If processes remain in the cgroup, the note stays for the next daemon.
func (r *runs) end(this run, byItself bool) {
	if this.group == "" {
		return
	}
	if !byItself {
		if err := killAndRemove(this.group, time.Now().Add(killTimeout)); err != nil {
			r.log.Error("kill the processes of a CNI plugin", "cgroup", this.group, "error", err)
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

// keep marks a run as over. Its plugin exited and left children.
func (r *runs) keep(this run) {
	failpoint.Reach("cni.keep-run")
	err := os.Rename(filepath.Join(r.dir, this.name), filepath.Join(r.dir, this.name+overMark))
	failpoint.Reach("cni.run-kept")
	if err != nil {
		r.log.Warn("mark a CNI plugin's run as over; the next daemon will kill the processes that the plugin left", "cgroup",
			this.group, "error", err)
	} else {
		this.name += overMark
	}
	r.mu.Lock()
	r.over = append(r.over, this)
	r.mu.Unlock()
}

// removeOver removes empty cgroups of the oldest runs that are over.
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
	r.over = append(r.over, busy...) // appended, so that the next call tries other cgroups first
	r.mu.Unlock()
}

func (r *runs) forget(this run) {
	failpoint.Reach("cni.forget-run")
	err := os.Remove(filepath.Join(r.dir, this.name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		r.log.Warn("remove note of a CNI plugin run", "run", this.name, "error", err)
	}
	failpoint.Reach("cni.run-forgotten")
}

// endAll waits for plugins of an earlier daemon and kills the remaining ones. If they continued
// after this daemon's DEL, their changes would never be undone. The error names cgroups whose
// processes cannot be killed. The next daemon tries again. endAll takes at most leftTimeout and
// killTimeout, and some milliseconds per run.
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
		r.log.Warn("kill CNI plugins of an earlier daemon", "error", err)
	}
	deadline := time.Now().Add(killTimeout)
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

// read returns the runs whose plugins may still run. It removes runs that are over and have no
// processes.
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
		r.mu.Lock()
		r.over = append(r.over, this)
		r.mu.Unlock()
	}
	return running, nil
}

// maxNote exceeds the size of any note, in bytes.
const maxNote = 16 << 10

// readRun reads a note. The run has no cgroup if the note is incomplete, or if a version without
// cgroups wrote it.
func readRun(path string) run {
	this := run{name: filepath.Base(path)}
	data, err := os.ReadFile(path) // in a private directory, written by this package
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

// untilEnded waits until runs have no processes, for at most leftTimeout. Runs noted by a version
// without cgroups count as busy for all of that time.
func untilEnded(ctx context.Context, running []run) error {
	ctx, cancel := context.WithTimeout(ctx, leftTimeout)
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
			return fmt.Errorf("%d plugins still run, the first is %s: %w", len(left), left[0], ctx.Err())
		case <-time.After(delay):
		}
	}
}

// killAndRemove kills all processes in a run's cgroup and removes it. It retries, because the
// cgroup stays busy for a moment after the last process was killed.
func killAndRemove(group string, deadline time.Time) error {
	failpoint.Reach("cni.kill-group")
	if err := cgroup.KillChild(group, time.Until(deadline)); err != nil {
		return err
	}
	failpoint.Reach("cni.group-killed")
	end := time.Now().Add(removeTimeout)
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		err := cgroup.RemoveChild(group)
		if err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
		time.Sleep(delay)
	}
}

// NotedRuns are the runs with a note in the RunDir of a [Config]. A [Network] may use the directory
// at the same time.
type NotedRuns struct {
	prefix string
	names  map[string]bool
}

// ReadNotedRuns reads the notes in runDir, which need not exist.
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

// Prefix returns the prefix of the names of the runs' cgroups.
func (n NotedRuns) Prefix() string { return n.prefix }

// Unnoted returns the name of the run of a cgroup, if this daemon's runs use the cgroup's prefix
// and the run has no note. Otherwise it returns "".
func (n NotedRuns) Unnoted(group string) string {
	for part := range strings.SplitSeq(group, "/") {
		if n.prefix != "" && strings.HasPrefix(part, n.prefix) && !n.names[part] {
			return part
		}
	}
	return ""
}
