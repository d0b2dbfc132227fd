package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgroup"
	"berth/internal/diskusage"
)

// Census is what is too expensive to be counted when somebody asks: it was counted
// in the background, at some time. It never changes.
type Census struct {
	At         time.Time
	Mountpoint string          // of the filesystem that holds the writable layer
	Layer      diskusage.Usage // the writable layer

	Processes *ProcessCensus // nil when the container did not run
}

// ProcessCensus is what a container's processes have open, of maxFiles files at most.
type ProcessCensus struct {
	Files, Sockets uint64
	MaxFiles       uint64 // soft limit of the init; math.MaxUint64: none
}

// Filesystem is the one that holds the writable layers.
type Filesystem struct {
	At         time.Time
	Mountpoint string          // names it to kubelet; the same as the images' if they share it
	Device     string          // as in mountinfo
	Used       diskusage.Usage // by all writable layers that were counted
	Bytes      uint64          // its size
	Inodes     uint64          // 0 where the filesystem has no fixed number
	FreeInodes uint64
}

// census counts in the background, one container after the other. Its owner is the
// lifetime Watchers.
type census struct {
	period     time.Duration // between two counts of a container, at least
	wake       chan struct{}
	mountpoint string
	device     string                     // empty if it is not known
	filesystem atomic.Pointer[Filesystem] // without Used
}

func newCensus(period time.Duration) *census {
	return &census{period: period, wake: make(chan struct{}, 1)}
}

const (
	// patience is how much longer than a count took nothing is counted after it: with it,
	// counting takes a tenth of one core's time, and that at the lowest priority.
	patience = 9
	// maxRest bounds that. Prometheus drops what is older than five minutes, so that one
	// container that is very slow to count must not silence the others.
	maxRest = 2 * time.Minute
	// maxIdle is the age that the filesystem's figures may have when nothing is to be counted.
	maxIdle = time.Minute
	// maxFiles is how many open files of a container are looked at.
	maxFiles = 100_000
)

// restAfter is for how long nothing is counted after a count that took so long.
func restAfter(took time.Duration) time.Duration { return min(patience*took, maxRest) }

// openCensus finds out where writable layers are and starts to count.
func (m *Manager) openCensus() error {
	images := m.images.Root()
	shared, err := sameFilesystem(images, m.writableDir(""))
	if err != nil {
		return err
	}
	m.census.mountpoint = m.writableDir("")
	if shared {
		m.census.mountpoint = images // kubelet tells by the name whether they share it (KEP-4191)
	}
	if m.census.device, err = deviceOf(m.writableDir("")); err != nil { // it is a label of metrics, no more
		m.log.Warn("metrics of writable layers name no device", "error", err)
	}
	if err := m.measureFilesystem(); err != nil {
		return err
	}
	m.tasks.Watchers.Spawn(m.takeCensus)
	return nil
}

func sameFilesystem(a, b string) (bool, error) {
	var x, y unix.Stat_t
	if err := unix.Stat(a, &x); err != nil {
		return false, fmt.Errorf("filesystem of %s: %w", a, err)
	}
	if err := unix.Stat(b, &y); err != nil {
		return false, fmt.Errorf("filesystem of %s: %w", b, err)
	}
	return x.Dev == y.Dev, nil
}

// deviceOf returns the source of the mount that a directory is in.
func deviceOf(dir string) (string, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", fmt.Errorf("device of %s: %w", dir, err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(real))
	if err != nil {
		return "", fmt.Errorf("device of %s: %w", dir, err)
	}
	var last *mountinfo.Info
	for _, m := range mounts { // of two at the same place the later one is seen
		if last == nil || len(m.Mountpoint) >= len(last.Mountpoint) {
			last = m
		}
	}
	if last == nil {
		return "", fmt.Errorf("device of %s: no mount holds it", dir)
	}
	return last.Source, nil
}

func (m *Manager) measureFilesystem() error {
	var st unix.Statfs_t
	if err := unix.Statfs(m.writableDir(""), &st); err != nil {
		return fmt.Errorf("size of the filesystem of writable layers: %w", err)
	}
	m.census.filesystem.Store(&Filesystem{At: time.Now(), Mountpoint: m.census.mountpoint, Device: m.census.device,
		Bytes: st.Blocks * uint64(st.Frsize), Inodes: st.Files, FreeInodes: st.Ffree})
	return nil
}

// WritableFilesystem returns where writable layers are and what they take there,
// from memory.
func (m *Manager) WritableFilesystem() Filesystem {
	f := *m.census.filesystem.Load()
	for _, c := range m.containers.snapshot() {
		if counted := c.census.Load(); counted != nil {
			f.Used.Bytes += counted.Layer.Bytes
			f.Used.Inodes += counted.Layer.Inodes
		}
	}
	return f
}

// countSoon has a container counted that started or ended.
func (m *Manager) countSoon() {
	select {
	case m.census.wake <- struct{}{}:
	default: // it is awake
	}
}

// takeCensus counts containers until the daemon ends. It has a thread of its own,
// which ends with it, because a low priority can't be taken back.
func (m *Manager) takeCensus() {
	runtime.LockOSThread()
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 19); err != nil {
		m.log.Warn("count writable layers at a low priority", "error", err)
	}
	ctx := m.tasks.Watchers.Context()
	due := map[string]time.Time{}
	for ctx.Err() == nil {
		if err := m.measureFilesystem(); err != nil {
			m.log.Warn("count writable layers", "error", err)
		}
		c, wait := m.nextToCount(due)
		if c == nil {
			rest(ctx, m.census.wake, min(wait, maxIdle))
			continue
		}
		begin := time.Now()
		if err := m.countContainer(ctx, c); err != nil && ctx.Err() == nil {
			m.log.Warn("count the writable layer", "container", c.id, "error", err)
		}
		due[c.id] = time.Now().Add(m.census.period)
		rest(ctx, nil, restAfter(time.Since(begin)))
	}
}

// rest waits for so long, or until it is woken.
func rest(ctx context.Context, wake <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-wake:
	case <-timer.C:
	}
}

// nextToCount returns the container that waits longest, or nil and after how long the
// next one is due. due is when each is to be counted again.
func (m *Manager) nextToCount(due map[string]time.Time) (*container, time.Duration) {
	all := m.containers.snapshot()
	for id := range due {
		if all[id] == nil {
			delete(due, id)
		}
	}
	var first *container
	for id, c := range all {
		if c.needsCensus() && (first == nil || cmp.Or(due[id].Compare(due[first.id]), cmp.Compare(id, first.id)) < 0) {
			first = c
		}
	}
	if first == nil {
		return nil, math.MaxInt64
	}
	if wait := time.Until(due[first.id]); wait > 0 {
		return nil, wait
	}
	return first, 0
}

// needsCensus is false for what can't have changed since it was counted.
func (c *container) needsCensus() bool {
	info, counted := c.info.Load(), c.census.Load()
	switch {
	case info == nil:
		return false
	case counted == nil || info.State == runtimeapi.ContainerState_CONTAINER_RUNNING:
		return true
	default:
		return counted.Processes != nil || info.FinishedAt.After(counted.At)
	}
}

// countContainer counts what a container has written and, if it runs, has open.
func (m *Manager) countContainer(ctx context.Context, c *container) error {
	defer m.tasks.Begin("the count of its writable layer", c.String())()
	upper, err := os.Open(filepath.Join(m.writableDir(c.id), "upper"))
	if os.IsNotExist(err) { // removed meanwhile
		return nil
	}
	if err != nil {
		return fmt.Errorf("open writable layer: %w", err)
	}
	defer upper.Close()
	counted := &Census{At: time.Now(), Mountpoint: m.census.mountpoint}
	run := c.running.Load()
	counted.Layer, err = diskusage.Tree(ctx, upper)
	if errors.Is(err, diskusage.ErrTooDeep) { // kubelet takes nothing for 0: the rest is better
		m.log.Warn("a writable layer takes more than was counted", "container", c.id, "counted", counted.Layer.Bytes, "error", err)
		err = nil
	}
	if err != nil {
		return fmt.Errorf("count writable layer: %w", err)
	}
	if p, known := m.pods.get(c.podID); run != nil && known && !p.sandboxed() {
		counted.Processes, err = m.countProcesses(ctx, c.rec.CgroupsPath, run.pid)
	}
	c.census.Store(counted)
	return err
}

// countProcesses counts what the processes in a cgroup have open. Those that end
// meanwhile count as far as they were seen.
func (m *Manager) countProcesses(ctx context.Context, cgroupsPath string, init int) (*ProcessCensus, error) {
	group, err := cgroup.Open(cgroupsPath, m.cfg.SystemdCgroup)
	if err != nil {
		return nil, err
	}
	pids, err := group.Procs()
	if err != nil {
		return nil, err
	}
	var limit unix.Rlimit
	err = unix.Prlimit(init, unix.RLIMIT_NOFILE, nil, &limit)
	if err != nil && err != unix.ESRCH {
		return nil, fmt.Errorf("limits of process %d: %w", init, err)
	}
	counted := &ProcessCensus{MaxFiles: limit.Cur}
	for _, pid := range pids {
		if err := counted.addFiles(ctx, fmt.Sprintf("/proc/%d/fd/", pid)); err != nil {
			return nil, fmt.Errorf("count open files: %w", err)
		}
	}
	return counted, nil
}

// addFiles counts the descriptors in a folder /proc/PID/fd. A process that has ended has none.
func (p *ProcessCensus) addFiles(ctx context.Context, dir string) error {
	f, err := os.Open(dir)
	if ended(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for p.Files < maxFiles {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := f.Readdirnames(256)
		for _, name := range names {
			target, err := os.Readlink(dir + name)
			if err != nil && !ended(err) {
				return err
			}
			p.Files++
			if strings.HasPrefix(target, "socket:") {
				p.Sockets++
			}
		}
		if err == io.EOF || ended(err) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func ended(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }
