package scarcity

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/integration/machine"
)

// smallDisk is a small filesystem for directories of a daemon. Tests can fill it or make it
// read-only.
type smallDisk struct {
	path    string // mount point
	ballast string
}

// Kinds of disks.
const (
	tmpfs = "tmpfs"
	ext4  = "ext4" // on a loop device
)

// newDisk mounts a disk of size bytes until the daemon has exited.
func newDisk(t *testing.T, d *harness.Daemon, name, kind string, size int64) *smallDisk {
	t.Helper()
	k := &smallDisk{path: filepath.Join(d.Dir, name)}
	k.ballast = filepath.Join(k.path, "ballast")
	harness.Must(t, os.Mkdir(k.path, 0o711))
	command := []string{"mount", "-t", "tmpfs", "-o", fmt.Sprintf("mode=0711,size=%d", size), "berth-test", k.path}
	if kind == ext4 {
		image := filepath.Join(t.TempDir(), name+".img")
		harness.Must(t, os.WriteFile(image, nil, 0o600))
		harness.Must(t, os.Truncate(image, size))
		runCommand(t, "mkfs.ext4", "-q", "-m", "0", "-N", "2000", "-O", "^has_journal", image)
		command = []string{"mount", "-o", "loop", image, k.path}
	}
	runCommand(t, command...)
	d.Mounts = append(d.Mounts, k.path)
	return k
}

// runCommand runs a command and expects success.
func runCommand(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// fill uses up all free bytes. Other processes may write meanwhile.
func (k *smallDisk) fill(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(k.ballast, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if errors.Is(err, unix.ENOSPC) {
		return
	}
	harness.Must(t, err)
	defer f.Close()
	for chunk := 1 << 20; chunk > 0; chunk /= 2 {
		zeros := make([]byte, chunk)
		for err = nil; err == nil; {
			_, err = f.Write(zeros)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// fillInodes uses up all inodes and leaves free bytes.
func (k *smallDisk) fillInodes(t *testing.T) {
	t.Helper()
	harness.Must(t, os.MkdirAll(k.ballast, 0o700))
	for n := 0; ; n++ {
		f, err := os.Create(filepath.Join(k.ballast, fmt.Sprint(n)))
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		harness.Must(t, err)
		harness.Must(t, f.Close())
	}
}

// empty deletes the files that fill and fillInodes created.
func (k *smallDisk) empty(t *testing.T) {
	t.Helper()
	harness.Must(t, os.RemoveAll(k.ballast))
}

// readOnly makes dir and the daemon's bind mounts in it read-only for new opens, or writable again.
// The filesystem itself cannot become read-only while files are open for writing. Filesystems
// mounted below dir do not change.
func (k *smallDisk) readOnly(t *testing.T, dir string, readOnly bool) {
	t.Helper()
	if !readOnly {
		harness.Must(t, unix.Mount("", dir, "", unix.MS_PRIVATE|unix.MS_REC, "")) // otherwise the unmount would propagate
		harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH))                       // a daemon started meanwhile has files open there
		return
	}
	before := len(machine.Mountpoints(t, os.Getpid()))
	harness.Must(t, unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""))
	for _, at := range machine.Mountpoints(t, os.Getpid())[before:] {
		if filesystem(t, at) == filesystem(t, k.path) {
			harness.Must(t, unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
		}
	}
}

func isReadOnly(t *testing.T, path string) bool {
	t.Helper()
	var stat unix.Statfs_t
	harness.Must(t, unix.Statfs(path, &stat))
	return stat.Flags&unix.ST_RDONLY != 0
}

// filesystem returns the device number of the filesystem of a path.
func filesystem(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	harness.Must(t, unix.Stat(path, &stat))
	return stat.Dev
}

// limitedGroup is a cgroup for a daemon and its children.
type limitedGroup struct{ dir string }

// inGroup starts the daemon in a separate cgroup with that controller. It skips the test if the
// controller is missing or if systemd manages all cgroups.
func inGroup(t *testing.T, controller string) (*limitedGroup, harness.DaemonOption) {
	t.Helper()
	if harness.SystemdDriver() {
		t.Skip("systemd manages the cgroups here")
	}
	group := harness.PodCgroup(fmt.Sprintf("daemon%d", os.Getpid()))
	g := &limitedGroup{dir: filepath.Join("/sys/fs/cgroup", controller, group)}
	if machine.Cgroup2() {
		g.dir = filepath.Join("/sys/fs/cgroup", group)
	}
	if err := os.MkdirAll(g.dir, 0o755); err != nil {
		t.Skipf("no cgroup for controller %s: %v", controller, err)
	}
	if machine.Cgroup2() {
		harness.Must(t, os.WriteFile(filepath.Join(filepath.Dir(g.dir), "cgroup.subtree_control"), []byte("+"+controller), 0o600))
	}
	t.Cleanup(func() {
		harness.Eventually(t, "the daemon's cgroup is empty", func() error {
			if err := os.Remove(g.dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			return nil
		})
	})
	return g, harness.StartedBy("sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, g.dir)
}

// limitMemory limits the memory of the group in bytes; 0: no limit.
func (g *limitedGroup) limitMemory(t *testing.T, limit int64) {
	t.Helper()
	file, value := "memory.limit_in_bytes", fmt.Sprint(limit)
	if machine.Cgroup2() {
		file = "memory.max"
	}
	if limit == 0 {
		value = map[bool]string{true: "max", false: "-1"}[machine.Cgroup2()]
	}
	g.set(t, file, value)
}

// peakMemory returns the peak memory of the group in bytes.
func (g *limitedGroup) peakMemory(t *testing.T) int64 {
	t.Helper()
	if machine.Cgroup2() {
		return g.number(t, "memory.peak") // Linux 5.19
	}
	return g.number(t, "memory.max_usage_in_bytes")
}

func (g *limitedGroup) set(t *testing.T, file string, value any) {
	t.Helper()
	harness.Must(t, os.WriteFile(filepath.Join(g.dir, file), fmt.Append(nil, value), 0o600))
}

func (g *limitedGroup) number(t *testing.T, file string) (n int64) {
	t.Helper()
	data := harness.Get(os.ReadFile(filepath.Join(g.dir, file)))(t)
	_, err := fmt.Sscan(string(data), &n)
	harness.Must(t, err)
	return n
}

// leaveFiles lowers the running daemon's limit of open files, so that it can open left more files.
// undo restores the limit.
func leaveFiles(t *testing.T, d *harness.Daemon, left int) (undo func()) {
	t.Helper()
	pid := d.Cmd.Process.Pid
	used := map[string]bool{}
	for _, fd := range machine.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)) {
		used[fd] = true
	}
	limit := 0 // above all open descriptors
	for free := 0; free < left || used[fmt.Sprint(limit)]; limit++ {
		if !used[fmt.Sprint(limit)] {
			free++
		}
	}
	return limitFiles(t, d, limit)
}

// limitFiles lowers the daemon's descriptor limit until undo is called. Open descriptors stay open.
func limitFiles(t *testing.T, d *harness.Daemon, limit int) (undo func()) {
	t.Helper()
	pid := d.Cmd.Process.Pid
	var old unix.Rlimit
	harness.Must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old))
	harness.Must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(limit), Max: old.Max}, nil))
	return func() { harness.Must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &old, nil)) }
}
