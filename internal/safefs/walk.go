package safefs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// walkOpen is how many directories of a walk are open at a time.
	walkOpen = 32
	// walkBuffer is how many bytes of names are read from a directory at a time.
	walkBuffer = 8 << 10
	// walkLevels is the maximum depth of a walk. Each level beyond walkOpen takes about 100 bytes
	// of memory.
	walkLevels = 1 << 17
)

// ErrTooDeep means that the walk skipped directories because they are nested too deeply.
var ErrTooDeep = errors.New("directories are nested too deep")

// ErrMoved means that a directory was moved or removed while a walk was below it, and that the walk
// skipped a part of its content.
var ErrMoved = errors.New("a directory was moved during the walk")

// Walk visits all entries below a directory, unordered. The tree may be hostile and may change
// meanwhile. The walk never leaves the tree. Memory and descriptors are limited even for deep and
// wide trees. One goroutine uses a Walk, which [NewWalk] starts, and must close it.
//
// At most walkOpen directories are open. Their ancestors are closed and opened again by file handle
// (open_by_handle_at(2)), even if they were moved. If the filesystem has no handles, they are
// opened by "..", and [ErrMoved] reports a moved directory.
type Walk struct {
	oneFilesystem bool
	root          *os.File // for opening file handles
	mount         int      // ID of the root's mount
	levels        int
	begin         time.Time
	closed        []place   // the upper levels, starting with the root
	open          []*reader // the lower levels
	spare         []*reader
	enter         string // the directory that Next visits first
	changed       bool
	tooDeep       bool
	moved         bool
}

// place is the position at which the walk continues in a directory that it has closed.
type place struct {
	cursor   int64
	dev, ino uint64
	handle   *unix.FileHandle // nil if the filesystem has no handles
}

// reader reads the names in a directory.
type reader struct {
	fd     int
	buf    []byte
	left   []byte // entries in buf that were not returned yet
	cursor int64  // position after the entry that was returned last
}

// Entry is a name in a directory. It is valid until the next call of [Walk.Next].
type Entry struct {
	Name string
	Dir  bool // it was a directory when the names were read
	dir  int
}

// NewWalk starts a walk below root, a directory. If oneFilesystem is set, it skips other
// filesystems that are mounted in the tree.
func NewWalk(root *os.File, oneFilesystem bool) (*Walk, error) {
	fd, err := open(root, "", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "walk", Path: root.Name(), Err: err}
	}
	w := &Walk{root: os.NewFile(uintptr(fd), root.Name()), oneFilesystem: oneFilesystem, mount: -1, levels: walkLevels}
	if err := w.start(); err != nil {
		return nil, &fs.PathError{Op: "walk", Path: root.Name(), Err: errors.Join(err, w.Close())}
	}
	return w, nil
}

func (w *Walk) start() error {
	// The kernel takes the times of files from this clock.
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
		return err
	}
	w.begin = time.Unix(now.Unix())
	if _, mount, err := unix.NameToHandleAt(int(w.root.Fd()), "", unix.AT_EMPTY_PATH); err == nil {
		w.mount = mount
	}
	return w.descend(int(w.root.Fd()), ".")
}

// Close ends the walk.
func (w *Walk) Close() error {
	var errs []error
	for len(w.open) > 0 {
		errs = append(errs, w.leave())
	}
	return errors.Join(append(errs, w.root.Close())...)
}

// Changed reports whether a directory has changed since the walk started. Then the walk may have
// missed files that moved from an unread directory to a directory that was read.
func (w *Walk) Changed() bool { return w.changed }

// Incomplete returns why the walk skipped parts of the tree ([ErrTooDeep], [ErrMoved]), or nil. If
// it is nil, the walk has visited everything that was not moved.
func (w *Walk) Incomplete() error {
	switch {
	case w.tooDeep:
		return ErrTooDeep
	case w.moved:
		return ErrMoved
	}
	return nil
}

// Skip skips the content of the directory that [Walk.Next] has just returned.
func (w *Walk) Skip() { w.enter = "" }

// Next returns the next entry, or io.EOF after the last one. A directory comes before its content.
func (w *Walk) Next() (Entry, error) {
	if name := w.enter; name != "" {
		w.enter = ""
		if err := w.descend(w.open[len(w.open)-1].fd, name); err != nil && !w.isGone(err) {
			return Entry{}, fmt.Errorf("open directory %q: %w", name, err)
		}
	}
	for len(w.open) > 0 {
		top := w.open[len(w.open)-1]
		e, err := top.next()
		if err == nil {
			if e.Dir {
				w.enter = e.Name
			}
			return e, nil
		}
		if !errors.Is(err, io.EOF) && !w.isGone(err) {
			return Entry{}, fmt.Errorf("read directory: %w", err)
		}
		if err := w.ascend(); err != nil {
			return Entry{}, err
		}
	}
	return Entry{}, io.EOF
}

// isGone reports whether an error means that a name vanished, changed its type or is on another
// filesystem.
func (w *Walk) isGone(err error) bool {
	switch {
	case errors.Is(err, unix.EXDEV):
		return true
	case IsGone(err):
		w.changed = true
		return true
	}
	return false
}

// IsGone reports whether an error means that a name vanished or changed its type.
func IsGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) ||
		errors.Is(err, unix.ESTALE)
}

// descend opens a directory and makes it the deepest level.
func (w *Walk) descend(dir int, name string) error {
	if len(w.closed)+len(w.open) == w.levels {
		w.tooDeep = true
		return unix.ENOENT
	}
	fd, err := w.openDir(dir, name)
	if err != nil {
		return err
	}
	if err := w.checkChange(fd); err != nil {
		return errors.Join(err, unix.Close(fd))
	}
	if len(w.open) == walkOpen {
		if err := w.closeFirst(); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
	}
	w.push(fd, 0)
	return nil
}

func (w *Walk) openDir(dir int, name string) (int, error) {
	var resolve uint64
	if w.oneFilesystem {
		resolve = unix.RESOLVE_NO_XDEV
	}
	// O_NOATIME hides the position of the walk, which access times would show to other processes.
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK
	fd, err := openat2(dir, name, flags|unix.O_NOATIME, 0, resolve)
	if errors.Is(err, unix.EPERM) {
		fd, err = openat2(dir, name, flags, 0, resolve)
	}
	return fd, err
}

// checkChange records whether a directory has changed since the walk started. No process can set
// the change time back.
func (w *Walk) checkChange(fd int) error {
	if w.changed {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	changed := time.Unix(st.Ctim.Unix())
	if changed.Nanosecond() == 0 { // the filesystem may store times in whole seconds
		changed = changed.Add(time.Second)
	}
	w.changed = !changed.Before(w.begin)
	return nil
}

func (w *Walk) push(fd int, cursor int64) {
	var r *reader
	if n := len(w.spare); n > 0 {
		r, w.spare = w.spare[n-1], w.spare[:n-1]
	} else {
		r = &reader{buf: make([]byte, walkBuffer)}
	}
	r.fd, r.left, r.cursor = fd, nil, cursor
	w.open = append(w.open, r)
}

// leave closes the deepest level.
func (w *Walk) leave() error {
	last := len(w.open) - 1
	r := w.open[last]
	w.open, w.spare = w.open[:last], append(w.spare, r)
	return os.NewSyscallError("close", unix.Close(r.fd))
}

// closeFirst closes the uppermost open directory and records its place.
func (w *Walk) closeFirst() error {
	r := w.open[0]
	var st unix.Stat_t
	if err := unix.Fstat(r.fd, &st); err != nil {
		return err
	}
	w.closed = append(w.closed, place{cursor: r.cursor, dev: st.Dev, ino: st.Ino, handle: w.handleOf(r.fd)})
	copy(w.open, w.open[1:])
	w.open = w.open[:len(w.open)-1]
	w.spare = append(w.spare, r)
	return os.NewSyscallError("close", unix.Close(r.fd))
}

// handleOf returns the handle of a directory, or nil if root cannot open one.
func (w *Walk) handleOf(fd int) *unix.FileHandle {
	handle, mount, err := unix.NameToHandleAt(fd, "", unix.AT_EMPTY_PATH)
	if err != nil || mount != w.mount {
		return nil
	}
	handle = unix.NewFileHandle(handle.Type(), handle.Bytes()) // a copy of the minimal size
	return &handle
}

// ascend leaves the deepest level, and opens the level above if it is closed.
func (w *Walk) ascend() error {
	deepest := w.open[len(w.open)-1]
	if err := w.checkChange(deepest.fd); err != nil {
		return err
	}
	if len(w.open) > 1 || len(w.closed) == 0 {
		return w.leave()
	}
	for len(w.closed) > 0 {
		last := len(w.closed) - 1
		above := w.closed[last]
		w.closed = w.closed[:last]
		fd, err := w.reopen(deepest.fd, above)
		if err == nil {
			err = w.leave()
			w.push(fd, above.cursor)
			return err
		}
		if !IsGone(err) {
			return fmt.Errorf("open the directory above: %w", err)
		}
		w.changed = true
	}
	return w.leave()
}

// reopen opens a directory that the walk has closed, at its recorded place. below is a directory in
// it.
func (w *Walk) reopen(below int, p place) (int, error) {
	fd, err := w.find(below, p)
	if err != nil {
		return -1, err
	}
	if _, err := unix.Seek(fd, p.cursor, io.SeekStart); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

func (w *Walk) find(below int, p place) (int, error) {
	if p.handle != nil {
		const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NONBLOCK | unix.O_CLOEXEC
		fd, err := unix.OpenByHandleAt(int(w.root.Fd()), *p.handle, flags|unix.O_NOATIME)
		if err != unix.EPERM { // berth runs as root of another user namespace, which is not permitted
			return fd, err
		}
	}
	fd, err := openat2(below, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	if st.Dev != p.dev || st.Ino != p.ino {
		w.moved = true
		return -1, errors.Join(unix.ESTALE, unix.Close(fd))
	}
	return fd, nil
}

// next returns the next name except "." and "..".
func (r *reader) next() (Entry, error) {
	for {
		if len(r.left) == 0 {
			n, err := unix.Getdents(r.fd, r.buf)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return Entry{}, err
			}
			if n == 0 {
				return Entry{}, io.EOF
			}
			r.left = r.buf[:n]
		}
		e, err := r.take()
		if err != nil || e.Name != "." && e.Name != ".." {
			return e, err
		}
	}
}

// take parses one struct linux_dirent64 and removes it from the buffer.
func (r *reader) take() (Entry, error) {
	const offsetCursor, offsetLength, offsetType, offsetName = 8, 16, 18, 19
	if len(r.left) < offsetName {
		return Entry{}, unix.EIO
	}
	length := int(binary.NativeEndian.Uint16(r.left[offsetLength:]))
	if length <= offsetName || length > len(r.left) {
		return Entry{}, unix.EIO
	}
	record := r.left[:length]
	r.left = r.left[length:]
	r.cursor = int64(binary.NativeEndian.Uint64(record[offsetCursor:]))
	e := Entry{Name: unix.ByteSliceToString(record[offsetName:]), dir: r.fd}
	if e.Name == "" || strings.Contains(e.Name, "/") {
		return Entry{}, unix.EIO
	}
	switch record[offsetType] {
	case unix.DT_DIR:
		e.Dir = true
	case unix.DT_UNKNOWN: // a filesystem that stores no types with names
		st, err := e.Stat()
		if err != nil && !IsGone(err) {
			return Entry{}, err
		}
		e.Dir = err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
	}
	return e, nil
}

// Stat returns the status of the entry without following a symlink.
func (e Entry) Stat() (unix.Stat_t, error) {
	var st unix.Stat_t
	for {
		err := unix.Fstatat(e.dir, e.Name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil {
			return st, nil
		}
		if err != unix.EINTR {
			return st, &fs.PathError{Op: "stat", Path: e.Name, Err: err}
		}
	}
}

// Open opens the entry with O_PATH, without following a symlink. It works for every type, including
// devices.
func (e Entry) Open() (*os.File, error) {
	fd, err := openat2(e.dir, e.Name, unix.O_PATH|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: e.Name, Err: err}
	}
	return os.NewFile(uintptr(fd), e.Name), nil
}
