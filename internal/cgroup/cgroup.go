// Package cgroup kills, removes and limits a container's cgroup, which it finds by the runtime-spec
// path. So the container's ID suffices to kill processes that a lost shim left behind. libcontainer
// creates the cgroup.
//
// All operations are idempotent. Killing, emptying or removing a cgroup that does not exist
// succeeds. Functions that take a directory (KillDir, ProcsIn) work on any cgroup.
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

// FromState returns the group of a container whose libcontainer state file is at path. It serves
// for a container that has no other record.
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
		return nil, fmt.Errorf("libcontainer state %s has no cgroup", path)
	}
	if c.Systemd {
		return Open(c.Parent+":"+c.ScopePrefix+":"+c.Name, true)
	}
	return Open(c.Path, false)
}

// Group is one container's cgroup in all hierarchies.
type Group struct {
	path    string // as in the runtime-spec, for error texts
	systemd bool   // a systemd scope
	mgr     cgroups.Manager
}

// Open returns the group at a runtime-spec cgroupsPath: an absolute path for the cgroupfs driver,
// "slice:prefix:name" for the systemd driver. It creates nothing.
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

// dirs returns the group's directories: one on v2, one per hierarchy on v1.
func (g *Group) dirs() []string {
	var dirs []string
	for _, dir := range g.mgr.GetPaths() {
		if dir != "" {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// Dir returns the group's directory in the hierarchy of a v1 controller, or "" if the controller is
// not mounted. On v2 all controllers share one directory.
func (g *Group) Dir(controller string) string { return g.mgr.Path(controller) }

// Paths returns the group's directories by controller on v1, or under "" on v2. They need not
// exist.
func (g *Group) Paths() map[string]string { return g.mgr.GetPaths() }

// Procs returns the processes of the group and its descendants in all hierarchies.
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

// Members returns the processes of the group and its descendants in one v1 hierarchy, which
// suffices for counting. A privileged process can leave a single hierarchy.
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

// OOMKills returns how many processes of the group the OOM killer has killed, on v2 including the
// group's descendants. It returns 0 if there is no memory controller.
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

// Kill sends SIGKILL to every process in the group and waits until all have exited. It repeats the
// signal until ctx ends, because processes may be forking, frozen, or in uninterruptible sleep.
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
			return fmt.Errorf("kill cgroup %s: processes %v still exist: %w", g.path, pids, ctx.Err())
		case <-time.After(delay):
		}
	}
}

// Signal sends SIGKILL to all current processes of the group and does not wait. On v2 the kernel
// kills them in one step, even in frozen groups (Linux 5.14). On v1 Signal freezes the group so
// that no fork escapes, and thaws it so that the processes receive the signal.
func (g *Group) Signal() error {
	if cgroups.IsCgroup2UnifiedMode() {
		err := writeFile(filepath.Join(g.mgr.Path(""), "cgroup.kill"), "1")
		if err == nil {
			return nil
		}
		if !gone(err) {
			return fmt.Errorf("kill cgroup %s: %w", g.path, err)
		}
		// The group does not exist, or the kernel is older than 5.14. Then the processes are killed
		// one by one.
	}
	freezeErr := g.freeze() // not fatal, because the caller repeats the call
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

// freezerFile returns the file that freezes the group, and the values to write.
func (g *Group) freezerFile() (dir, name, frozen, thawed string) {
	if cgroups.IsCgroup2UnifiedMode() {
		return g.mgr.Path(""), "cgroup.freeze", "1", "0"
	}
	return g.mgr.Path("freezer"), "freezer.state", "FROZEN", "THAWED"
}

// FreezerDir returns the directory of the group that freezes its processes, empty if there is none.
func (g *Group) FreezerDir() string {
	dir, _, _, _ := g.freezerFile()
	return dir
}

// Thaw thaws the group and its descendants. A group that does not exist is no error.
func (g *Group) Thaw() error {
	failpoint.Reach("cgroup.thaw")
	err := g.thaw()
	failpoint.Reach("cgroup.thawed")
	return err
}

func (g *Group) freeze() error {
	dir, name, frozen, _ := g.freezerFile()
	if dir == "" {
		return nil
	}
	return ignoreGone(writeFile(filepath.Join(dir, name), frozen))
}

// thaw thaws the group and its descendants. A process that froze a group and was killed before the
// thaw would leave frozen processes that cannot exit.
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

// Destroy removes the group and its descendants. Their processes must have exited. While the kernel
// reports the group as busy, because processes are still being reaped, Destroy retries until ctx
// ends. It waits for systemd until ctx ends, too.
func (g *Group) Destroy(ctx context.Context) error {
	var err error
	for delay := time.Millisecond; ; delay = min(2*delay, 200*time.Millisecond) {
		failpoint.Reach("cgroup.remove")
		now := g.destroyOnce(ctx)
		if now == nil {
			failpoint.Reach("cgroup.removed")
			return nil
		}
		if err == nil || ctx.Err() == nil { // the previous error explains more than the end of ctx
			err = now
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", g.path, err)
		case <-time.After(delay):
		}
	}
}

// destroyOnce tries to remove the group until ctx ends. The library (0.0.6) waits up to 30 seconds
// for systemd and takes no context. The goroutine that calls systemd may outlive destroyOnce for
// that time. It may still remove the group, which is intended.
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

// RemoveIdle removes the group if it has no processes and no descendants, and reports whether it is
// gone. For an exited container it avoids that the group is frozen and listed. It returns false
// with the systemd driver, because systemd must remove its units.
func (g *Group) RemoveIdle() bool {
	if g.systemd {
		return false
	}
	failpoint.Reach("cgroup.remove-idle")
	idle := true
	for _, dir := range inRemovalOrder(g.Paths()) {
		if err := unix.Rmdir(dir); err != nil && !gone(err) { // EBUSY: the group is in use, probably in the other hierarchies as well
			idle = false
			break
		}
	}
	failpoint.Reach("cgroup.idle-removed")
	return idle
}

// inRemovalOrder returns directories in an order that is safe while processes remain. The freezer's
// directory is last, because only the freezer stops processes that fork while they are killed. On
// v1 a privileged process can leave one hierarchy and stay in the others.
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

// RemoveIfEmpty removes the cgroupfs group at path in every hierarchy where it has neither
// processes nor descendants. It is for parent groups that berth created.
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

// gone reports whether err means that the cgroup does not exist. Opening a file then returns
// ENOENT. Using a file that was opened before the removal returns ENODEV.
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
