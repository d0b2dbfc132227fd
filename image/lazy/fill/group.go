package fill

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
)

// eventFlags are the flags of the descriptors that come with events. Their accesses raise no
// events.
const eventFlags = unix.O_RDWR | unix.O_LARGEFILE | unix.O_CLOEXEC

// group is a fanotify group. Its file is non-blocking, in all processes that hold it.
type group struct {
	file *os.File
	conn syscall.RawConn
}

// newGroup returns a group without marks. The error is errors.ErrUnsupported before Linux 6.14.
func newGroup() (*group, error) {
	const flags = unix.FAN_CLASS_PRE_CONTENT | unix.FAN_UNLIMITED_QUEUE | unix.FAN_UNLIMITED_MARKS |
		unix.FAN_CLOEXEC | unix.FAN_NONBLOCK
	fd, err := unix.FanotifyInit(flags, eventFlags)
	if err != nil {
		return nil, fmt.Errorf("create fanotify group: %w", orUnsupported(err))
	}
	return openGroup(os.NewFile(uintptr(fd), "fanotify"))
}

// openGroup returns the group of a file, which it owns if there is no error.
func openGroup(f *os.File) (*group, error) {
	const want = "anon_inode:[fanotify]"
	if name, err := os.Readlink(selfFD(f)); err != nil || name != want {
		return nil, errors.Join(fmt.Errorf("open fanotify group: the file is %q", name), err)
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("open fanotify group: %w", err)
	}
	return &group{f, conn}, nil
}

func selfFD(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// orUnsupported adds errors.ErrUnsupported to errors of a kernel or filesystem without events
// before accesses.
func orUnsupported(err error) error {
	for _, cannot := range []error{unix.ENOSYS, unix.EINVAL, unix.EOPNOTSUPP, unix.ENODEV} {
		if errors.Is(err, cannot) {
			return fmt.Errorf("%w (%w)", errors.ErrUnsupported, err)
		}
	}
	return err
}

// mark makes accesses to a file raise events, through all descriptors opened from now on. A mark
// that exists stays.
func (g *group) mark(f *os.File) error { return g.change(unix.FAN_MARK_ADD, f) }

// unmark removes the mark of a file. A missing mark is no error.
func (g *group) unmark(f *os.File) error {
	err := g.change(unix.FAN_MARK_REMOVE, f)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func (g *group) change(flags uint, f *os.File) error {
	var err error
	failed := g.conn.Control(func(fd uintptr) {
		err = unix.FanotifyMark(int(fd), flags, unix.FAN_PRE_ACCESS, int(f.Fd()), "")
	})
	if err = errors.Join(failed, err); err != nil {
		return fmt.Errorf("change the fanotify mark of %s: %w", f.Name(), orUnsupported(err))
	}
	return nil
}

// read waits for an event and reads it into p.
func (g *group) read(p []byte) error {
	var n int
	var err error
	failed := g.conn.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), p)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	switch {
	case failed != nil:
		return failed
	case err != nil:
		return fmt.Errorf("read fanotify event: %w", err)
	case n == 0:
		return errors.New("read fanotify event: nothing")
	}
	return nil
}

// Responses to an event.
const (
	allow   = uint32(unix.FAN_ALLOW)
	denyEIO = uint32(unix.FAN_DENY) | uint32(unix.EIO)<<24 // FAN_DENY_ERRNO, Linux 6.13
)

// respond answers the event with a number. An event that was answered before, or whose process was
// killed, is no error.
func (g *group) respond(number int32, response uint32) error {
	var p [8]byte
	binary.NativeEndian.PutUint32(p[:], uint32(number))
	binary.NativeEndian.PutUint32(p[4:], response)
	var err error
	failed := g.conn.Control(func(fd uintptr) {
		for {
			if _, err = unix.Write(int(fd), p[:]); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	if err = errors.Join(failed, err); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("answer fanotify event: %w", err)
	}
	return nil
}

// openUnwatched opens a file for reading and writing. Accesses through the descriptor raise no
// events, even if the file is marked. Writes through a descriptor from open(2) would raise events
// that the Engine itself would have to answer.
func openUnwatched(path string) (_ *os.File, err error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, eventFlags)
	if err != nil {
		return nil, fmt.Errorf("open %s: create fanotify group: %w", path, orUnsupported(err))
	}
	defer unix.Close(fd)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN, int(f.Fd()), ""); err != nil {
		return nil, fmt.Errorf("open %s: set fanotify mark: %w", path, orUnsupported(err))
	}
	again, err := os.Open(selfFD(f)) // raises the event
	if err != nil {
		return nil, err
	}
	defer again.Close()
	var p [eventSize]byte
	if _, err := unix.Read(fd, p[:]); err != nil {
		return nil, fmt.Errorf("open %s: read fanotify event: %w", path, err)
	}
	number := int32(binary.NativeEndian.Uint32(p[eventFD:]))
	if number < 0 {
		return nil, fmt.Errorf("open %s: the event has no descriptor", path)
	}
	own := os.NewFile(uintptr(number), path)
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("close "+path, own.Close)
	if err := sameFile(f, own); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	undo.Release()
	return own, nil
}

func sameFile(f, g *os.File) error {
	a, err := f.Stat()
	if err != nil {
		return err
	}
	b, err := g.Stat()
	if err != nil {
		return err
	}
	if !os.SameFile(a, b) || !a.Mode().IsRegular() {
		return errors.New("it is not a regular file, or another one")
	}
	return nil
}
