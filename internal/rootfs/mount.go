package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
	"berth/internal/failpoint"
)

// MaxLayers is the maximum number of lower layers of overlayfs (OVL_MAX_STACK).
const MaxLayers = 500

// options are the overlayfs options of every root filesystem. All are set explicitly, because
// kernel configurations and module parameters change the defaults.
//
//   - volatile (Linux 5.10): no sync of the upper filesystem on fsync or unmount.
//     Otherwise the end of each container would make the kernel write back the whole filesystem
//     (sync_filesystem in overlayfs' put_super), and all other containers would wait. No data is
//     lost, because a container's upper layer is never used after the boot in which it was created.
//     See mark.go about the marker against a second mount.
//   - metacopy=off, redirect_dir=nofollow: no extended attribute of a lower layer may redirect
//     overlayfs to another file. This is a second safeguard, because package image/layer drops such
//     attributes. Both features would save copies when a container changes the owner of a large
//     file or renames a directory, but the upper layer would depend on them.
//   - index=off: an index ties the upper layer to the inodes of its lower layers and
//     refuses layers that were fetched again (ESTALE).
//
// xino keeps its default. Layers and upper layer usually share a filesystem, so files keep its
// inode numbers. The default also suits other cases.
var options = []option{
	{key: "metacopy", value: "off"},
	{key: "redirect_dir", value: "nofollow"},
	{key: "index", value: "off"},
}

// volatileOption is for mounts with an upper layer only.
var volatileOption = option{key: "volatile"}

// contextOption gives all files of a mount an SELinux label.
const contextOption = "context"

type option struct{ key, value string }

func (o option) String() string {
	switch {
	case o.value == "":
		return o.key
	case o.key == contextOption: // a label may contain commas
		return o.key + `="` + o.value + `"`
	}
	return o.key + "=" + o.value
}

// Mount mounts the root filesystem, detached. Attach attaches it to a path. The mount ends when its
// last descriptor is closed. It is private (no propagation). It is read-only if there is no Upper.
// Mount needs Linux 5.10. Before 6.7 it uses a temporary thread with a separate mount namespace.
//
// The error wraps errors.ErrUnsupported if a layer's kind has no driver or the kernel has no
// overlayfs. It wraps fs.ErrInvalid for a Spec with no layers or with more than MaxLayers.
func (s Spec) Mount() (*os.File, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	return s.orOld(s.mountNew())
}

// orOld returns its arguments, or the result of mountOld if the kernel needs it.
func (s Spec) orOld(mount *os.File, err error) (*os.File, error) {
	if errors.Is(err, errors.ErrUnsupported) && !s.hasImage() {
		return s.mountOld()
	}
	return mount, err
}

// mountNew implements Mount without mount(2), for kernels that do not need mountOld.
func (s Spec) mountNew() (*os.File, error) {
	if s.isSingle() {
		return s.cloneReadOnly()
	}
	return s.mountOverlay()
}

// Attach attaches a detached mount to target, an existing directory of the host, or an existing
// file for a mount of a file.
func Attach(mount *os.File, target string) error {
	err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	runtime.KeepAlive(mount)
	if err != nil {
		return fmt.Errorf("attach mount to %s: %w", target, err)
	}
	return nil
}

// MountAt mounts the root filesystem on target, like Mount and Attach. With an IDMap the mount that
// contains target must be private.
func (s Spec) MountAt(target string) error {
	if s.IDMap != nil {
		return s.mountMapped(target)
	}
	mount, err := s.Mount()
	if err != nil {
		return err
	}
	defer mount.Close()
	return Attach(mount, target)
}

// MakeUpper creates Upper and Work, whose parent must exist. It keeps existing directories. Upper
// gets the owner and mode of the topmost layer's root, because overlayfs shows the attributes of
// the upper directory for /. MakeUpper does nothing for a read-only Spec.
func (s Spec) MakeUpper() error {
	if err := s.check(); err != nil {
		return err
	}
	if s.Upper == "" {
		return nil
	}
	st, err := s.Layers[len(s.Layers)-1].stat()
	if err != nil {
		return err
	}
	if err := MakeDir(s.Work, 0o700, 0, 0); err != nil {
		return err
	}
	uid, gid := s.IDMap.Owner(st.Uid, st.Gid)
	return MakeDir(s.Upper, st.Mode&0o7777, uid, gid)
}

// stat returns the status of the layer's root.
func (l Layer) stat() (st unix.Stat_t, err error) {
	root, err := l.mounted()
	if err != nil {
		return st, err
	}
	defer root.Close() // read-only
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return st, fmt.Errorf("stat layer %s: %w", l.Path, err)
	}
	return st, nil
}

// MakeDir creates a directory, whose parent must exist, or keeps an existing one. It uses a
// temporary name at first, so that the directory never appears without its owner and mode.
func MakeDir(path string, mode uint32, uid, gid int) (err error) {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	failpoint.Reach("rootfs.make")
	tmp, err := os.MkdirTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return fmt.Errorf("make directory %s: %w", path, err)
	}
	failpoint.Reach("rootfs.directory-made")
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("remove "+tmp, func() error { return os.Remove(tmp) })
	if err := os.Chown(tmp, uid, gid); err != nil {
		return err
	}
	failpoint.Reach("rootfs.owner-set")
	if err := unix.Chmod(tmp, mode); err != nil {
		return fmt.Errorf("chmod %s: %w", tmp, err)
	}
	failpoint.Reach("rootfs.mode-set")
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	failpoint.Reach("rootfs.named")
	undo.Release()
	return nil
}

func (s Spec) check() error {
	switch {
	case len(s.Layers) == 0:
		return fmt.Errorf("root filesystem without layers: %w", fs.ErrInvalid)
	case len(s.Layers) > MaxLayers:
		return fmt.Errorf("root filesystem of %d layers, the limit of overlayfs is %d: %w", len(s.Layers), MaxLayers, fs.ErrInvalid)
	case (s.Upper == "") != (s.Work == ""):
		return fmt.Errorf("root filesystem with only one of upper and work directory: %w", fs.ErrInvalid)
	}
	for _, l := range s.Layers {
		if l.Kind != Directory && l.Kind != EROFS {
			return fmt.Errorf("mount layer %s: no driver for kind %q: %w", l.Path, l.Kind, errors.ErrUnsupported)
		}
	}
	return nil
}

// isSingle reports whether the root consists of one layer only. overlayfs refuses to mount it,
// because it requires two lower layers or an upper layer.
func (s Spec) isSingle() bool { return len(s.Layers) == 1 && s.Upper == "" }

// hasImage reports whether a layer is an EROFS image.
func (s Spec) hasImage() bool {
	return slices.ContainsFunc(s.Layers, func(l Layer) bool { return l.Kind == EROFS })
}

// cloneReadOnly returns a read-only bind mount of the only layer, detached.
func (s Spec) cloneReadOnly() (*os.File, error) {
	path := s.Layers[0].Path
	root, err := s.Layers[0].mounted()
	if err != nil {
		return nil, err
	}
	defer root.Close() // read-only
	fd, err := unix.OpenTree(int(root.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", path, err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make mount of %s read-only: %w", path, orUnsupported(err))
	}
	return os.NewFile(uintptr(fd), path), nil
}

func (s Spec) mountOverlay() (*os.File, error) {
	dirs, err := s.open()
	if err != nil {
		return nil, err
	}
	defer dirs.close()
	if err := s.clearVolatile(); err != nil {
		return nil, err
	}
	return overlayOf(dirs)
}

// overlayOf mounts an overlay with the option "lowerdir+" (Linux 6.7), which takes one layer per
// call. So separators need not be escaped, and the options need not fit in one page.
func overlayOf(dirs *dirs) (*os.File, error) { return overlayWith(dirs, setDir) }

// dirSetter sets an option of a filesystem context to a directory.
type dirSetter func(fsfd int, key string, dir *os.File) error

func overlayWith(dirs *dirs, setDir dirSetter) (*os.File, error) {
	fsfd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open overlay filesystem: %w", orUnsupported(err))
	}
	defer unix.Close(fsfd)
	if acceptsAnyOption(fsfd) {
		return nil, fmt.Errorf("overlay option lowerdir+: %w", errors.ErrUnsupported)
	}
	if err := configure(fsfd, dirs, setDir); err != nil {
		return nil, err
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make overlay mount: %w%s", err, messages(fsfd))
	}
	return os.NewFile(uintptr(fd), "overlay"), nil
}

func configure(fsfd int, dirs *dirs, setDir dirSetter) error {
	for i, dir := range dirs.lower {
		err := setDir(fsfd, "lowerdir+", dir)
		if errors.Is(err, unix.EINVAL) && i == 0 {
			return fmt.Errorf("overlay option lowerdir+: %w", errors.ErrUnsupported)
		}
		if err != nil {
			return fmt.Errorf("overlay layer %s: %w%s", dir.Name(), err, messages(fsfd))
		}
	}
	for _, d := range dirs.writable() {
		if err := setDir(fsfd, d.key, d.dir); err != nil {
			return fmt.Errorf("overlay option %s=%s: %w%s", d.key, d.dir.Name(), err, messages(fsfd))
		}
	}
	for _, o := range dirs.options() {
		if err := set(fsfd, o); err != nil {
			return fmt.Errorf("overlay option %s: %w%s", o, err, messages(fsfd))
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return fmt.Errorf("create overlay of %d layers on %s: %w%s",
			len(dirs.lower), dirs.lower[0].Name(), err, messages(fsfd))
	}
	return nil
}

// noOption is an option that no filesystem has.
const noOption = "berth-no-such-option"

// acceptsAnyOption reports whether a filesystem context accepts options that do not exist. That of
// overlayfs does so before Linux 6.5. There only the creation of the filesystem fails, with an
// error in the kernel's log.
func acceptsAnyOption(fsfd int) bool {
	if unix.FsconfigSetFlag(fsfd, noOption) == nil {
		return true
	}
	messages(fsfd) // must not appear in later errors
	return false
}

// setDir sets an option to a directory. The container's /proc/PID/mounts shows the value, so setDir
// prefers a path, which helps operators. It passes a descriptor for directories that have no usable
// path. These are detached mounts, paths that are too long for fsconfig(2), and paths with
// characters that overlayfs unescapes.
func setDir(fsfd int, key string, dir *os.File) error {
	if path := dir.Name(); len(path) < maxOption && filepath.IsAbs(path) && !strings.ContainsAny(path, `\,:`) {
		return unix.FsconfigSetString(fsfd, key, path)
	}
	err := unix.FsconfigSetFd(fsfd, key, int(dir.Fd()))
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EBADF) { // Linux 6.13, and 6.15 for O_PATH
		err = setByNumber(fsfd, key, dir)
	}
	runtime.KeepAlive(dir)
	return err
}

// setByNumber implements setDir for kernels whose overlayfs refuses descriptors. It names the
// directory by its descriptor number, relative to the working directory /proc/self/fd. An absolute
// path would show "/proc" in each container's mounts, which Kubernetes' test of ProcMount counts.
func setByNumber(fsfd int, key string, dir *os.File) error {
	return inFDs(func() error { return unix.FsconfigSetString(fsfd, key, fdName(dir)) })
}

// inFDs calls f on a thread whose working directory is /proc/self/fd.
func inFDs(f func() error) error {
	return onThread(unix.CLONE_FS, func() error {
		if err := unix.Chdir("/proc/self/fd"); err != nil {
			return fmt.Errorf("change to /proc/self/fd: %w", err)
		}
		return f()
	})
}

func set(fsfd int, o option) error {
	if o.value == "" {
		return unix.FsconfigSetFlag(fsfd, o.key)
	}
	return unix.FsconfigSetString(fsfd, o.key, o.value)
}

// maxOption is the maximum length of the value of an fsconfig option, including the zero at its
// end.
const maxOption = 256

// dirs are the open directories of an overlay. The name of each file is its directory's path, for
// error texts.
type dirs struct {
	lower       []*os.File // topmost first, as in overlayfs' options
	upper, work *os.File
	label       string
}

func (s Spec) open() (*dirs, error) {
	d := &dirs{label: s.Label}
	for i := len(s.Layers) - 1; i >= 0; i-- {
		f, err := s.Layers[i].mounted()
		if err != nil {
			d.close()
			return nil, err
		}
		d.lower = append(d.lower, f)
	}
	if s.Upper == "" {
		return d, nil
	}
	var err error
	if d.upper, err = openDir(s.Upper); err == nil {
		d.work, err = openDir(s.Work)
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func openDir(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory of overlay %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// dirOption is an option with a directory as its value.
type dirOption struct {
	key string
	dir *os.File
}

// writable returns the options for the upper and the work directory. It returns nil for a read-only
// overlay.
func (d *dirs) writable() []dirOption {
	if d.upper == nil {
		return nil
	}
	return []dirOption{{"upperdir", d.upper}, {"workdir", d.work}}
}

// options returns the options whose value is no directory.
func (d *dirs) options() []option {
	all := options
	if d.upper != nil {
		all = append([]option{volatileOption}, all...)
	}
	if d.label != "" {
		all = append([]option{{contextOption, d.label}}, all...)
	}
	return all
}

func (d *dirs) close() {
	for _, f := range append(d.lower, d.upper, d.work) {
		if f != nil {
			f.Close() // O_PATH: closing cannot lose data
		}
	}
}

// messages returns the kernel's messages in the log of a filesystem context.
func messages(fsfd int) string {
	var all []string
	buf := make([]byte, 1024)
	for {
		n, err := unix.Read(fsfd, buf)
		if err != nil || n == 0 {
			break
		}
		if text := string(buf[:n]); len(text) > 2 { // a level, a blank and the text
			all = append(all, strings.TrimSpace(text[2:]))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, "; ") + ")"
}

// orUnsupported adds errors.ErrUnsupported to the errno of a missing system call or filesystem.
func orUnsupported(err error) error {
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("%w (%w)", errors.ErrUnsupported, err)
	}
	return err
}
