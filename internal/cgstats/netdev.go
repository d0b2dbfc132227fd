package cgstats

import (
	"bytes"
	"fmt"
	"sync"
)

// NetDev reads the interfaces of a network namespace. The first Read opens a file, which keeps the
// namespace alive until Close.
type NetDev struct {
	enter func(open func() error) error
	file  kept[*file]
	// lock serializes readers. The file has many records, and all readers of an open file share one
	// position in it.
	lock sync.Mutex
}

// maxNetDev bounds how much of the file is read, in bytes: about 500 interfaces. A container that
// may create interfaces can create tens of thousands.
const maxNetDev = 64 << 10

// NewNetDev returns a reader for a network namespace. enter calls open on a thread in the
// namespace. It returns ErrGone if the namespace does not exist.
func NewNetDev(enter func(open func() error) error) *NetDev { return &NetDev{enter: enter} }

// Read returns the interfaces except loopback and interfaces whose names are not UTF-8, which
// protobuf messages cannot contain. It returns at most about 500. The error is ErrGone, or the
// error of opening or reading the file.
func (d *NetDev) Read() ([]Interface, error) {
	f, err := d.file.get(d.open)
	if err != nil {
		return nil, fmt.Errorf("open network statistics: %w", gone(err))
	}
	b, err := d.content(f)
	if err != nil {
		return nil, fmt.Errorf("read network statistics: %w", gone(err))
	}
	return parseInterfaces(b, nil), nil
}

func (d *NetDev) content(f *file) ([]byte, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	b, err := readAll(f, buf, maxNetDev)
	return b[:bytes.LastIndexByte(b, '\n')+1], err
}

// Close releases the namespace. Later reads fail with ErrGone.
func (d *NetDev) Close() error { return d.file.close() }

func (d *NetDev) open() (f *file, err error) {
	err = d.enter(func() (err error) {
		f, err = openFile("/proc/thread-self/net/dev")
		return err
	})
	return f, err
}
