package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/proto"
)

// restoreNamespace is the mount namespace in which CRIU restores a container. CRIU makes deleted
// files again before it enters the container's root, by paths that lead through the container's
// directories. A symbolic link there leads to the host's files. So everything is read-only in this
// namespace, except the container's root filesystem, its cgroups, CRIU's temporary files and /proc.
//
// /proc stays writable: CRIU writes /proc/sys/kernel/ns_last_pid, oom_score_adj and loginuid
// through it, and the restoring tasks do so through their descriptor of it. A symbolic link in a
// volume cannot lead there, because of the mount option nosymfollow (see links.go).
//
// libcontainer makes files of its own on the same thread, before and after it starts CRIU. So the
// namespace becomes read-only just before CRIU starts. The thread leaves it before libcontainer
// sends CRIU's first request. libcontainer has no callback for these moments, but it logs a message
// at each. restoreNamespace is a hook of its log, like resumeGate. If a message is missing, the
// processes are not resumed.
type restoreNamespace struct {
	outside  *os.File // the thread's mount namespace before and after the start of CRIU
	writable []string // mount points
	yard     string   // where CRIU finds the cgroups
	confined bool     // the namespace is read-only
	left     bool     // CRIU is alone in it
	started  func(criu int) error
	fail     func(error)
}

// criuTemp is CRIU's directory for temporary files.
const criuTemp = "/tmp"

// enterNamespace moves this thread to a new namespace. The thread must be locked and have a mount
// namespace of its own.
func (b *restoreBackend) enterNamespace() (_ *restoreNamespace, err error) {
	n := &restoreNamespace{
		writable: []string{criuTemp, "/proc", b.workDir(), b.criuRoot()},
		yard:     filepath.Join(b.workDir(), restoreYard),
	}
	if n.outside, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
		return nil, err
	}
	if err = b.makeNamespace(); err == nil {
		err = b.forbidLinks()
	}
	if err != nil {
		return nil, errors.Join(err, n.outside.Close())
	}
	return n, nil
}

// makeNamespace moves this thread to a new mount namespace, which gets no later mounts of the host.
// In the namespace /tmp is empty, and CRIU's work directory is a mount.
func (b *restoreBackend) makeNamespace() error {
	failpoint.Reach("launcher.make-namespace")
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	failpoint.Reach("launcher.namespace-made")
	if err := b.separateMounts(); err != nil {
		return err
	}
	failpoint.Reach("launcher.make-criu-work")
	if err := os.Mkdir(b.workDir(), 0o700); err != nil {
		return fmt.Errorf("make CRIU's work directory: %w", err)
	}
	failpoint.Reach("launcher.criu-work-made")
	if err := unix.Mount(b.workDir(), b.workDir(), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount CRIU's work directory: %w", err)
	}
	return nil
}

// separateMounts makes all mounts private, except those that the container gets, and empties /tmp.
// CRIU gives the container's mounts the propagation of their sources. If /tmp itself is a volume,
// it stays, because its container can write there in any case.
func (b *restoreBackend) separateMounts() error {
	needed, err := b.needed()
	if err != nil {
		return err
	}
	trees := make([]*os.File, 0, len(needed))
	defer func() {
		for _, tree := range trees {
			_ = tree.Close() // Close of a mount loses nothing
		}
	}()
	failpoint.Reach("launcher.separate-mounts")
	for _, path := range needed {
		fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("copy the mount %s: %w", path, err)
		}
		trees = append(trees, os.NewFile(uintptr(fd), path))
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if !slices.Contains(needed, criuTemp) {
		if err := unix.Mount("tmpfs", criuTemp, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
			return fmt.Errorf("hide %s: %w", criuTemp, err)
		}
	}
	for _, tree := range trees {
		if err := attach(tree); err != nil {
			return err
		}
	}
	failpoint.Reach("launcher.mounts-separated")
	return nil
}

// criuRoot is where libcontainer mounts the container's root filesystem for CRIU.
func (b *restoreBackend) criuRoot() string {
	return filepath.Join(b.l.settings.StateRoot, b.ID, "criu-root")
}

// needed returns the sources of the container's mounts, and the files in /tmp that the restore
// needs.
func (b *restoreBackend) needed() (paths []string, err error) {
	paths, err = writableCgroups()
	if err != nil {
		return nil, err
	}
	for _, m := range b.config.Mounts {
		if m.Device == "bind" {
			paths = append(paths, filepath.Clean(m.Source))
		}
	}
	for _, path := range []string{b.Dir, b.l.settings.StateRoot, b.Spec.Root.Path, b.Restore.Images, b.Restore.CRIU} {
		if isBelow(path, criuTemp) {
			paths = append(paths, filepath.Clean(path))
		}
	}
	slices.Sort(paths) // directories precede the files in them
	return slices.Compact(paths), nil
}

func isBelow(path, dir string) bool { return strings.HasPrefix(path, dir+"/") }

// attach mounts a copy of a mount where the original was. If the source was in /tmp, it creates the
// mount point.
func attach(tree *os.File) error {
	path := tree.Name()
	if _, err := os.Lstat(path); isBelow(path, criuTemp) && errors.Is(err, fs.ErrNotExist) {
		if err := makePlace(tree, path); err != nil {
			return fmt.Errorf("make mount point %s: %w", path, err)
		}
	}
	failpoint.Reach("launcher.attach-mount")
	err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
	failpoint.Reach("launcher.mount-attached")
	if err != nil {
		return fmt.Errorf("mount %s: %w", path, err)
	}
	return nil
}

// makePlace makes a mount point in the new /tmp.
func makePlace(tree *os.File, path string) error {
	info, err := tree.Stat()
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.make-tmp-place")
	defer failpoint.Reach("launcher.tmp-place-made")
	if info.IsDir() {
		return os.MkdirAll(path, 0o755)
	}
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o600))
}

// open makes n wait for libcontainer's messages. started is called with CRIU's PID when CRIU runs.
// If CRIU cannot be confined, fail is called with an error before CRIU has got a request.
func (n *restoreNamespace) open(started func(criu int) error, fail func(error)) {
	n.started, n.fail = started, fail
	logrus.AddHook(n)
}

// Levels implements logrus.Hook.
func (n *restoreNamespace) Levels() []logrus.Level { return []logrus.Level{logrus.DebugLevel} }

// libcontainer's messages immediately before it starts CRIU, where the version follows, and after
// it has moved CRIU to the container's cgroup.
const (
	startMessage   = "Using CRIU "
	startedMessage = "Using CRIU in RESTORE mode"
)

// Fire implements logrus.Hook.
func (n *restoreNamespace) Fire(e *logrus.Entry) error {
	message := strings.TrimSpace(e.Message)
	var err error
	switch {
	case message == startedMessage:
		err = n.start()
	case strings.HasPrefix(message, startMessage):
		err = n.confine()
	}
	if err != nil {
		n.fail(fmt.Errorf("confine CRIU: %w", err))
	}
	return nil
}

// confine makes all mounts read-only. cgroups stay writable until CRIU is in its cgroup.
func (n *restoreNamespace) confine() error {
	groups, err := writableCgroups()
	if err != nil {
		return err
	}
	err = setReadOnly("/", unix.AT_RECURSIVE, true)
	if errors.Is(err, unix.ENOSYS) {
		return proto.Errorf(proto.FailedPrecondition, "a restore needs Linux 5.14 or later")
	}
	if err != nil {
		return err
	}
	for _, place := range slices.Concat(n.writable, groups) {
		if err := setReadOnly(place, 0, false); err != nil {
			return err
		}
	}
	n.confined = true
	return nil
}

// start leaves CRIU alone in the namespace.
func (n *restoreNamespace) start() error {
	if !n.confined {
		return errors.New("its namespace is not read-only")
	}
	criu, err := findCRIU()
	if err != nil {
		return err
	}
	if err := n.leave(criu); err != nil {
		return err
	}
	return n.started(criu)
}

// leave makes cgroups read-only, too, except CRIU's own, and moves the thread out of the namespace.
func (n *restoreNamespace) leave(criu int) error {
	groups, err := writableCgroups()
	if err != nil {
		return err
	}
	if err := n.makeYard(criu); err != nil { // handled later, because it stays writable
		return fmt.Errorf("mount cgroups for CRIU: %w", err)
	}
	for _, place := range groups {
		if err := setReadOnly(place, 0, true); err != nil {
			return err
		}
	}
	failpoint.Reach("launcher.leave-namespace")
	if err := unix.Setns(int(n.outside.Fd()), unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	failpoint.Reach("launcher.namespace-left")
	n.left = true
	return nil
}

// writableCgroups returns the mount points of cgroup hierarchies that this thread can write to.
// Mounts that others cover are left out, because no path leads to them.
func writableCgroups() (places []string, err error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		if !slices.Contains(strings.Split(m.Options, ","), "rw") {
			continue
		}
		var st unix.Statx_t
		err := unix.Statx(unix.AT_FDCWD, m.Mountpoint, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("statx %s: %w", m.Mountpoint, err)
		}
		if err == nil && st.Mnt_id == uint64(m.ID) {
			places = append(places, m.Mountpoint)
		}
	}
	return places, nil
}

func setReadOnly(place string, flags uint, readOnly bool) error {
	var attr unix.MountAttr
	if readOnly {
		attr.Attr_set = unix.MOUNT_ATTR_RDONLY
	} else {
		attr.Attr_clr = unix.MOUNT_ATTR_RDONLY
	}
	failpoint.Reach("launcher.set-read-only")
	err := unix.MountSetattr(unix.AT_FDCWD, place, flags, &attr)
	failpoint.Reach("launcher.read-only-set")
	if err != nil {
		return fmt.Errorf("mount_setattr %s: %w", place, err)
	}
	return nil
}
