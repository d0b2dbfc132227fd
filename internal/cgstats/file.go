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

// file is an open file of the kernel's, of which any number may read at once.
type file struct {
	*os.File
	conn syscall.RawConn
}

// openFile opens a file of the kernel's. os.Open would have the poller watch it,
// which cgroup files allow, and wake up for their events.
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

// bufferSize has room for any file that is one record: memory.stat, the largest, has 2 to 3 KiB.
const bufferSize = 16 << 10

// buffer is what one goroutine reads a file into.
type buffer struct {
	bytes  [bufferSize]byte
	offset int
	n      int
	err    error
	pread  func(fd uintptr) // made once, so that reading allocates nothing
}

var buffers = sync.Pool{New: func() any {
	b := &buffer{}
	b.pread = func(fd uintptr) {
		for {
			b.n, b.err = unix.Pread(int(fd), b.bytes[:], int64(b.offset))
			if b.err != unix.EINTR {
				return
			}
		}
	}
	return b
}}

// read reads once, at an offset; the bytes are valid until the next read into buf. It is
// one pread(2), where os.File.ReadAt goes on to the end of the file: all readers of a file
// share the kernel's position in its records (fs/seq_file.c), so that a second pread
// may give the end of what has changed meanwhile.
func (f *file) read(buf *buffer, offset int) ([]byte, error) {
	buf.offset = offset
	if err := f.conn.Control(buf.pread); err != nil {
		return nil, os.ErrClosed // the only thing that keeps Control from calling
	}
	if buf.err != nil {
		return nil, &fs.PathError{Op: "read", Path: f.Name(), Err: buf.err}
	}
	return buf.bytes[:buf.n], nil
}

// content reads a file that the kernel writes in one go. It is nil without a file.
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

// number reads a file that holds one number.
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

// readAll reads a file of any number of records, whole records with each read, up to about
// max bytes. Nobody else may read it meanwhile.
func readAll(f *file, buf *buffer, max int) ([]byte, error) {
	all := []byte{} // and not nil, which is no file
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
