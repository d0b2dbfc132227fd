package cgstats

import (
	"bytes"
	"fmt"
	"sync"
)

// NetDev reads the interfaces of a network namespace. It opens its file with the
// first Read, which keeps the namespace in existence until Close.
type NetDev struct {
	enter func(open func() error) error
	file  kept[*file]
	// turn is the reader's: the file has many records, and all who read it share the
	// kernel's position in them.
	turn sync.Mutex
}

// maxNetDev is how much of the file is read, some 500 interfaces: a container that may
// make interfaces can make tens of thousands.
const maxNetDev = 64 << 10

// NewNetDev returns a reader for the network namespace in which enter calls open, on
// a thread that is in no other meanwhile. Where there is none enter returns ErrGone.
func NewNetDev(enter func(open func() error) error) *NetDev { return &NetDev{enter: enter} }

// Read returns the interfaces but the loopback device, and but those with names that
// are not UTF-8: messages can't have them. Of very many it returns some 500. The error is
// ErrGone, or what kept the file from being opened or read.
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
	d.turn.Lock()
	defer d.turn.Unlock()
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	b, err := readAll(f, buf, maxNetDev)
	return b[:bytes.LastIndexByte(b, '\n')+1], err
}

// Close gives the namespace back. Reads fail with ErrGone from then on.
func (d *NetDev) Close() error { return d.file.close() }

func (d *NetDev) open() (f *file, err error) {
	err = d.enter(func() (err error) {
		f, err = openFile("/proc/thread-self/net/dev")
		return err
	})
	return f, err
}
