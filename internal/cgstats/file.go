package cgstats

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// file is an open kernel file. Any number of goroutines may read it at once.
type file struct {
	*os.File
	conn syscall.RawConn
}

// openFile opens a kernel file. os.Open would add it to the poller, because cgroup files support
// polling, and each event would wake up the daemon.
func openFile(path string) (*file, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &file{f, conn}, nil
}

// bufferSize suffices for any file with one record. The largest such file, memory.stat, has 2 to 3
// KiB.
const bufferSize = 16 << 10

// buffer is the read buffer of one goroutine.
type buffer struct {
	bytes  [bufferSize]byte
	offset int
	n      int
	err    error
	pread  func(fd uintptr) // a field, so that reading allocates no memory
}

var buffers = sync.Pool{New: func() any {
	b := &buffer{}
	b.pread = func(fd uintptr) {
		for {
			b.n, b.err = unix.Pread(int(fd), b.bytes[:], int64(b.offset))
			if !errors.Is(b.err, unix.EINTR) {
				return
			}
		}
	}
	return b
}}

// read reads once at an offset. The bytes are valid until the next read into buf. It calls pread(2)
// once, whereas os.File.ReadAt continues to the end of the file. All readers of a file share the
// kernel's position in its records (fs/seq_file.c). So a second pread may return the end of content
// that has changed meanwhile.
func (f *file) read(buf *buffer, offset int) ([]byte, error) {
	buf.offset = offset
	if err := f.conn.Control(buf.pread); err != nil {
		return nil, os.ErrClosed // Control calls the function unless the file is closed
	}
	if buf.err != nil {
		return nil, &fs.PathError{Op: "read", Path: f.Name(), Err: buf.err}
	}
	return buf.bytes[:buf.n], nil
}

// content reads a file that the kernel writes in one piece. It returns nil for a nil file.
func content(f *file, buf *buffer) ([]byte, error) {
	if f == nil {
		return nil, nil
	}
	b, err := f.read(buf, 0)
	if err == nil && len(b) == bufferSize {
		err = fmt.Errorf("%s: larger than expected", f.Name())
	}
	return b, err
}

// number reads a file with a single number.
func number(f *file, buf *buffer, parse func([]byte) (uint64, bool)) (v uint64, known bool, err error) {
	b, err := content(f, buf)
	if err != nil || b == nil {
		return 0, false, err
	}
	if v, known = parse(b); !known {
		return 0, false, fmt.Errorf("%s: %.40q is not a number", f.Name(), b)
	}
	return v, true, nil
}

// readAll reads a file with any number of records, in whole records and up to about max bytes. The
// caller must exclude other readers of the file.
func readAll(f *file, buf *buffer, max int) ([]byte, error) {
	all := []byte{} // not nil, which means no file
	for len(all) < max {
		b, err := f.read(buf, len(all))
		if err != nil {
			return nil, err
		}
		if len(b) == 0 {
			break
		}
		all = append(all, b...)
	}
	return all, nil
}
