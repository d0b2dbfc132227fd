// Package cgroup reaches a container's cgroup from its runtime-spec path alone,
// so that what a lost process left can be killed and removed by anybody who
// knows the container's ID. Creating the cgroup is libcontainer's part.
//
// All operations are idempotent: a cgroup that is gone is killed, empty and
// destroyed.
package cgroup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// FromState returns the group of a container whose libcontainer state file is at
// path: for what is left of a container that nothing else is known of.
func FromState(path string) (*Group, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read libcontainer state: %w", err)
	}
	var state struct {
		Config struct {
			Cgroups *cgroups.Cgroup `json:"cgroups"`
		} `json:"config"`
	}
	if err := json.Unmarshal(data, &state); err != nil {
		return nil, fmt.Errorf("libcontainer state %s: %w", path, err)
	}
	c := state.Config.Cgroups
	if c == nil {
		return nil, fmt.Errorf("libcontainer state %s names no cgroup", path)
	}
	if c.Systemd {
		return Open(c.Parent+":"+c.ScopePrefix+":"+c.Name, true)
	}
	return Open(c.Path, false)
}

// Group is one container's cgroup, in all hierarchies it has.
type Group struct {
	path    string // as in the runtime-spec, for messages
	systemd bool   // a scope of systemd's
	mgr     cgroups.Manager
}

// Open returns the group at a runtime-spec cgroupsPath: an absolute path for the
// cgroupfs driver, "slice:prefix:name" for the systemd driver. Nothing is made.
func Open(cgroupsPath string, systemd bool) (*Group, error) {
	cfg := &cgroups.Cgroup{Systemd: systemd, Resources: &cgroups.Resources{SkipDevices: true, SkipFreezeOnSet: true}}
	if systemd {
		parts := strings.Split(cgroupsPath, ":")
		if len(parts) != 3 {
			return nil, fmt.Errorf("cgroup path %q is not slice:prefix:name", cgroupsPath)
		}
		cfg.Parent, cfg.ScopePrefix, cfg.Name = parts[0], parts[1], parts[2]
	} else {
		if !filepath.IsAbs(cgroupsPath) || filepath.Clean(cgroupsPath) != cgroupsPath {
			return nil, fmt.Errorf("cgroup path %q is not absolute and clean", cgroupsPath)
		}
		cfg.Path = cgroupsPath
	}
	mgr, err := manager.NewWithPaths(cfg, pathsOf(cfg))
	if err != nil {
		return nil, fmt.Errorf("open cgroup %s: %w", cgroupsPath, err)
	}
	return &Group{path: cgroupsPath, systemd: systemd, mgr: mgr}, nil
}

// dirs returns the group's folders: one on v2, one per hierarchy on v1.
func (g *Group) dirs() []string {
	var dirs []string
	for _, dir := range g.mgr.GetPaths() {
		if dir != "" {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// Dir returns the group's folder in the hierarchy of a v1 controller, "" if that is
// not mounted. On v2 it is the same for all.
func (g *Group) Dir(controller string) string { return g.mgr.Path(controller) }

// Paths returns the group's folders by controller on v1; that of v2 is under "". They
// need not exist.
func (g *Group) Paths() map[string]string { return g.mgr.GetPaths() }

// Procs returns the processes of the group and of groups below it.
func (g *Group) Procs() ([]int, error) {
	seen := map[int]bool{}
	var pids []int
	for _, dir := range g.dirs() {
		in, err := ProcsIn(dir)
		if err != nil {
			return nil, fmt.Errorf("list processes of cgroup %s: %w", g.path, err)
		}
		for _, pid := range in {
			if !seen[pid] {
				seen[pid] = true
				pids = append(pids, pid)
			}
		}
	}
	return pids, nil
}

// Members returns the processes of the group and of groups below it, as one of v1's hierarchies has them. It is for who counts: a
// process that has the right to can leave that one alone.
func (g *Group) Members() ([]int, error) {
	for _, controller := range []string{"pids", "memory", "freezer"} {
		if dir := g.Dir(controller); dir != "" {
			pids, err := ProcsIn(dir)
			if err != nil {
				return nil, fmt.Errorf("list processes of cgroup %s: %w", g.path, err)
			}
			return pids, nil
		}
	}
	return g.Procs()
}

// OOMKills returns how many processes of the group, and on v2 of those below it, the kernel has
// killed for lack of memory. 0 where the group has no memory controller.
func (g *Group) OOMKills() (uint64, error) {
	name := "memory.oom_control"
	if cgroups.IsCgroup2UnifiedMode() {
		name = "memory.events"
	}
	dir := g.Dir("memory")
	if dir == "" {
		return 0, nil
	}
	content, err := os.ReadFile(filepath.Join(dir, name))
	if gone(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("OOM kills in cgroup %s: %w", g.path, err)
	}
	for line := range strings.Lines(string(content)) {
		if n, found := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); found { // on v1 since Linux 4.13
			return strconv.ParseUint(n, 10, 64)
		}
	}
	return 0, nil
}

// Kill sends SIGKILL to every process in the group and waits until none is left,
// looking again as long as ctx allows: processes may be forking, or frozen, or
// in uninterruptible sleep.
func (g *Group) Kill(ctx context.Context) error {
	failpoint.Reach("cgroup.kill")
	for delay := time.Millisecond; ; delay = min(2*delay, 200*time.Millisecond) {
		if err := g.Signal(); err != nil {
			return err
		}
		pids, err := g.Procs()
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			failpoint.Reach("cgroup.killed")
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kill cgroup %s: processes %v do not end: %w", g.path, pids, ctx.Err())
		case <-time.After(delay):
		}
	}
}

// Signal sends SIGKILL to what is in the group now and does not wait. On v2 (Linux 5.14) the kernel does it in
// one step, frozen groups included. On v1 the group is frozen meanwhile, so that
// no fork escapes, and thawed so that the signal is acted on.
func (g *Group) Signal() error {
	if cgroups.IsCgroup2UnifiedMode() {
		err := writeFile(filepath.Join(g.mgr.Path(""), "cgroup.kill"), "1")
		if err == nil {
			return nil
		}
		if !gone(err) {
			return fmt.Errorf("kill cgroup %s: %w", g.path, err)
		}
		// Gone, or a kernel before 5.14: one process after the other.
	}
	freezeErr := g.freeze() // without it a caller that looks again still gets there
	failpoint.Reach("cgroup.frozen")
	pids, err := g.Procs()
	for _, pid := range pids {
		if e := unix.Kill(pid, unix.SIGKILL); e != nil && e != unix.ESRCH {
			err = errors.Join(err, fmt.Errorf("kill %d: %w", pid, e))
		}
	}
	failpoint.Reach("cgroup.signalled")
	if e := g.thaw(); e != nil {
		err = errors.Join(err, freezeErr, e)
	}
	if err != nil {
		return fmt.Errorf("kill cgroup %s: %w", g.path, err)
	}
	return nil
}

// freezerFile is where the group's processes are stopped, and the words for it.
func (g *Group) freezerFile() (dir, name, frozen, thawed string) {
	if cgroups.IsCgroup2UnifiedMode() {
		return g.mgr.Path(""), "cgroup.freeze", "1", "0"
	}
	return g.mgr.Path("freezer"), "freezer.state", "FROZEN", "THAWED"
}

func (g *Group) freeze() error {
	dir, name, frozen, _ := g.freezerFile()
	if dir == "" {
		return nil
	}
	return ignoreGone(writeFile(filepath.Join(dir, name), frozen))
}

// thaw thaws the group and all below it: a process that was killed while it froze
// one of those would have left it frozen, with its processes unable to die.
func (g *Group) thaw() error {
	dir, name, _, thawed := g.freezerFile()
	if dir == "" {
		return nil
	}
	return ignoreGone(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return ignoreGone(err)
		}
		return ignoreGone(writeFile(filepath.Join(path, name), thawed))
	}))
}

func ignoreGone(err error) error {
	if gone(err) {
		return nil
	}
	return err
}

// Destroy removes the group and those below it. Its processes must be gone; a
// group that the kernel still calls busy (they are being reaped) is tried again
// as long as ctx allows. systemd is waited for no longer, either.
func (g *Group) Destroy(ctx context.Context) error {
	var err error
	for delay := time.Millisecond; ; delay = min(2*delay, 200*time.Millisecond) {
		failpoint.Reach("cgroup.remove")
		now := g.destroyOnce(ctx)
		if now == nil {
			failpoint.Reach("cgroup.removed")
			return nil
		}
		if err == nil || ctx.Err() == nil { // that the time is over is no better reason than the last one
			err = now
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", g.path, err)
		case <-time.After(delay):
		}
	}
}

// destroyOnce gives up when ctx ends. The library (0.0.6) asks systemd without a context and waits for it up to 30 seconds, after which the
// goroutine ends that is left behind then; it may remove the group still, which is what was asked for.
func (g *Group) destroyOnce(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- g.mgr.Destroy() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// RemoveIdle removes the group if no process is left in it and no group is below it, and tells whether it is gone. That is
// how a container leaves it that has ended by itself: the kernel knows, and nothing has to be frozen, listed and waited for. It is
// never so with systemd, which has to be told.
func (g *Group) RemoveIdle() bool {
	if g.systemd {
		return false
	}
	failpoint.Reach("cgroup.remove-idle")
	idle := true
	for _, dir := range inRemovalOrder(g.Paths()) {
		if err := unix.Rmdir(dir); err != nil && !gone(err) { // EBUSY: in use, and in the other hierarchies probably too
			idle = false
			break
		}
	}
	failpoint.Reach("cgroup.idle-removed")
	return idle
}

// inRemovalOrder returns folders by controller in the order in which they may be removed as long as there may be a process in one of
// them: that of the freezer last, without which nobody could hold what forks while it is killed. (On v1 a process that has the right to
// can leave one hierarchy and stay in the others.)
func inRemovalOrder(paths map[string]string) []string {
	last := paths["freezer"]
	var dirs []string
	for _, dir := range paths {
		if dir != "" && dir != last { // a hierarchy may have several controllers
			dirs = append(dirs, dir)
		}
	}
	if last != "" {
		dirs = append(dirs, last)
	}
	return dirs
}

// RemoveIfEmpty removes the cgroupfs group at path in every hierarchy where it
// has neither processes nor groups below it. It is for groups that berth itself
// made as parents.
func RemoveIfEmpty(path string) error {
	g, err := Open(path, false)
	if err != nil {
		return err
	}
	for _, dir := range g.dirs() {
		err := unix.Rmdir(dir)
		if err != nil && !gone(err) && err != unix.EBUSY && err != unix.ENOTEMPTY {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
	}
	return nil
}

// gone tells whether err says that the cgroup does not exist (any more): opening
// gives ENOENT, using a file opened before its removal ENODEV.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

func writeFile(path, data string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(data)
	return errors.Join(err, f.Close())
}
