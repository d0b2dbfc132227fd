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
	// walkLevels is how deep a walk goes. Each level beyond walkOpen takes about 100 bytes of
	// memory.
	walkLevels = 1 << 17
)

// ErrTooDeep says that directories are nested deeper than a walk goes, and that their content was
// left out.
var ErrTooDeep = errors.New("directories are nested too deep")

// ErrMoved says that a directory was moved or removed while a walk was below it, and that a part of
// its content was left out.
var ErrMoved = errors.New("a directory was moved during the walk")

// Walk visits everything below a directory, unordered. The tree may be hostile and may change
// meanwhile. The walk never leaves it, and memory and descriptors are limited, however deep and
// wide it is. One goroutine uses a Walk and must close it.
//
// At most walkOpen directories are open. The others above are closed and opened again by file
// handle (open_by_handle_at(2)), even if they were moved. On filesystems without handles they are
// opened by "..", and ErrMoved reports one that was moved.
type Walk struct {
	oneFilesystem bool
	root          *os.File // for opening file handles
	mount         int      // ID of its mount
	levels        int
	begin         time.Time
	closed        []place   // the levels above, the root's first
	open          []*reader // the levels below them
	spare         []*reader
	enter         string // the directory that Next visits first
	changed       bool
	tooDeep       bool
	moved         bool
}

// place is where the walk goes on in a directory that it has closed.
type place struct {
	cursor   int64
	dev, ino uint64
	handle   *unix.FileHandle // nil where the filesystem has none
}

// reader reads the names in a directory.
type reader struct {
	fd     int
	buf    []byte
	left   []byte // of buf: entries that were not returned
	cursor int64  // behind the entry that was returned last
}

// Entry is a name in a directory. It is good until the next call of Next.
type Entry struct {
	Name string
	Dir  bool // it was a directory when the names were read
	dir  int
}

// NewWalk starts a walk below root, a directory. With oneFilesystem it omits other filesystems
// mounted in the tree.
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
	// The clock that the kernel takes times of files from.
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

// Changed reports whether a directory has changed since the walk began. Then the walk may have
// omitted files that moved from an unread directory to one already read.
func (w *Walk) Changed() bool { return w.changed }

// Incomplete tells why parts of the tree were left out: ErrTooDeep, ErrMoved. It is nil if the walk
// left out nothing that stayed where it was.
func (w *Walk) Incomplete() error {
	switch {
	case w.tooDeep:
		return ErrTooDeep
	case w.moved:
		return ErrMoved
	}
	return nil
}

// Skip leaves out the content of the directory that Next has just returned.
func (w *Walk) Skip() { w.enter = "" }

// Next returns the next entry, io.EOF after the last one. The content of a directory comes after
// it.
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

// isGone reports whether an error is due to a name that vanished, changed its type or is on another
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

// IsGone reports whether an error is due to a name that vanished or changed its type.
func IsGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) ||
		errors.Is(err, unix.ESTALE)
}

// descend opens a directory as the deepest level.
func (w *Walk) descend(dir int, name string) error {
	if len(w.closed)+len(w.open) == w.levels {
		w.tooDeep = true
		return unix.ENOENT
	}
	fd, err := w.openDir(dir, name)
	if err != nil {
		return err
	}
	if err := w.look(fd); err != nil {
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
	// Times of access would show others where the walk is.
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK
	fd, err := openat2(dir, name, flags|unix.O_NOATIME, 0, resolve)
	if errors.Is(err, unix.EPERM) {
		fd, err = openat2(dir, name, flags, 0, resolve)
	}
	return fd, err
}

// look notes whether a directory has changed since the walk began. Nobody can set the time of the
// change back.
func (w *Walk) look(fd int) error {
	if w.changed {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	changed := time.Unix(st.Ctim.Unix())
	if changed.Nanosecond() == 0 { // maybe a filesystem that knows no fractions of seconds
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

// closeFirst closes the first open directory, and remembers where it is.
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

// handleOf returns the handle of a directory, nil if it has none that root can open.
func (w *Walk) handleOf(fd int) *unix.FileHandle {
	handle, mount, err := unix.NameToHandleAt(fd, "", unix.AT_EMPTY_PATH)
	if err != nil || mount != w.mount {
		return nil
	}
	handle = unix.NewFileHandle(handle.Type(), handle.Bytes()) // no larger than it needs to be
	return &handle
}

// ascend leaves the deepest level, and opens the one above if it is closed.
func (w *Walk) ascend() error {
	deepest := w.open[len(w.open)-1]
	if err := w.look(deepest.fd); err != nil {
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

// reopen opens a directory that the walk has closed, at the place where it was. below is one below
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
		if err != unix.EPERM { // not permitted where the root of another user namespace runs berth
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

// next returns the next name but "." and "..".
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
	case unix.DT_UNKNOWN: // a filesystem that does not keep types with names
		st, err := e.Stat()
		if err != nil && !IsGone(err) {
			return Entry{}, err
		}
		e.Dir = err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
	}
	return e, nil
}

// Stat returns the status of the entry itself.
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

// Open opens the entry itself, also where it is a symlink or a device, for what needs no more than
// its descriptor (O_PATH).
func (e Entry) Open() (*os.File, error) {
	fd, err := openat2(e.dir, e.Name, unix.O_PATH|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: e.Name, Err: err}
	}
	return os.NewFile(uintptr(fd), e.Name), nil
}
