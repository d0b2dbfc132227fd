package fill

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
)

// The ring is a memory file: a page with ringMagic, then ringSlots slots. A slot has room for one
// event, as the kernel writes it, and the Engine's state of the event.
const (
	ringMagic = "berth lazy ring 1\n"
	ringHead  = 4096
	ringSlots = 4096
	slotSize  = 64
	ringSize  = ringHead + ringSlots*slotSize

	eventSize    = 48 // the event with its range
	slotInode    = 48 // inode of the file, 8 bytes; 0: not known yet
	slotState    = 56
	slotResponse = 60
)

// States of a slot. A slot keeps its state after a crash, so the order of the changes matters.
const (
	slotFree      = iota // the event, if any, is answered
	slotReading          // the kernel may write an event into it; an event that is there is not answered
	slotAnswering        // an answer is being written; after a crash it is unknown whether the kernel has it
)

// Places in an event (struct fanotify_event_metadata, struct fanotify_event_info_range).
const (
	eventVersion = 4
	eventMask    = 8
	eventFD      = 16
	eventInfo    = 24
	infoOffset   = eventInfo + 8
	infoCount    = eventInfo + 16
)

// ring is the shared record of events. Only one goroutine reads events into it. Slots that have an
// event belong to the goroutine that answers it.
type ring struct {
	file *os.File
	mem  []byte
}

// newRing returns an empty ring.
func newRing() (_ *ring, err error) {
	fd, err := unix.MemfdCreate("berth-lazy-ring", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create ring: %w", err)
	}
	f := os.NewFile(uintptr(fd), "berth-lazy-ring")
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("close ring", f.Close)
	if err := f.Truncate(ringSize); err != nil {
		return nil, fmt.Errorf("create ring: %w", err)
	}
	if _, err := f.WriteAt([]byte(ringMagic), 0); err != nil {
		return nil, fmt.Errorf("create ring: %w", err)
	}
	// Another size would let a holder of the file crash the daemon with SIGBUS.
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal ring: %w", err)
	}
	r, err := mapRing(f)
	if err != nil {
		return nil, err
	}
	undo.Release()
	return r, nil
}

// mapRing maps the ring of an earlier Engine. The ring owns f if there is no error.
func mapRing(f *os.File) (*ring, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open ring: %w", err)
	}
	if st.Size() != ringSize {
		return nil, fmt.Errorf("open ring: it has %d bytes, not %d", st.Size(), ringSize)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, ringSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map ring: %w", err)
	}
	if !bytes.HasPrefix(mem, []byte(ringMagic)) {
		return nil, errors.Join(errors.New("open ring: unknown format"), unix.Munmap(mem))
	}
	// The kernel denies an event that it cannot write to the ring, for example because of a page
	// fault in a dying process. If the process may not lock memory, the pages are still present
	// unless they are swapped out.
	_ = unix.Mlock(mem)
	return &ring{f, mem}, nil
}

func (r *ring) close() error { return errors.Join(unix.Munmap(r.mem), r.file.Close()) }

// slot returns the memory of a slot.
func (r *ring) slot(i int) []byte {
	return r.mem[ringHead+i*slotSize:][:slotSize:slotSize]
}

// word returns a field of a slot for atomic access. Slots are aligned.
func (r *ring) word(i, at int) *uint32 { return (*uint32)(unsafe.Pointer(&r.slot(i)[at])) }

// prepare makes a free slot ready for the kernel, and returns the memory to read into.
func (r *ring) prepare(i int) []byte {
	s := r.slot(i)
	clear(s[:slotState])
	atomic.StoreUint32(r.word(i, slotState), slotReading)
	return s[:eventSize]
}

// setInode records the inode of the file to which the slot's event belongs.
func (r *ring) setInode(i int, inode uint64) {
	binary.NativeEndian.PutUint64(r.slot(i)[slotInode:], inode)
}

// begin records that the answer to a slot's event is about to be written.
func (r *ring) begin(i int, response uint32) {
	atomic.StoreUint32(r.word(i, slotResponse), response)
	atomic.StoreUint32(r.word(i, slotState), slotAnswering)
}

// end records that the answer was written, or that there is no event.
func (r *ring) end(i int) { atomic.StoreUint32(r.word(i, slotState), slotFree) }

// event is an event of the kernel: a process is about to access count bytes from an offset.
type event struct {
	slot          int
	fd            int32 // the number that the answer must have
	inode         uint64
	offset, count int64
}

// errNoAccess is returned for an event that needs no answer.
var errNoAccess = errors.New("event is no access")

// event decodes the event in a slot.
func (r *ring) event(i int) (event, error) {
	s := r.slot(i)
	n := binary.NativeEndian
	ev := event{slot: i, fd: int32(n.Uint32(s[eventFD:])), inode: n.Uint64(s[slotInode:])}
	switch {
	case s[eventVersion] != unix.FANOTIFY_METADATA_VERSION:
		return ev, fmt.Errorf("%w: version %d", errNoAccess, s[eventVersion])
	case n.Uint64(s[eventMask:])&unix.FAN_PRE_ACCESS == 0 || ev.fd < 0:
		return ev, fmt.Errorf("%w: mask %#x, descriptor %d", errNoAccess, n.Uint64(s[eventMask:]), ev.fd)
	}
	ev.count = maxFile // without a range: all of the file
	if n.Uint32(s) >= eventSize && s[eventInfo] == unix.FAN_EVENT_INFO_TYPE_RANGE {
		ev.offset, ev.count = clamp(n.Uint64(s[infoOffset:])), clamp(n.Uint64(s[infoCount:]))
	}
	return ev, nil
}

// maxFile is more than the size of any file.
const maxFile = 1 << 61

func clamp(n uint64) int64 { return int64(min(n, maxFile)) }

// pending is an event that an earlier Engine has read and perhaps not answered.
type pending struct {
	event
	answering bool   // the earlier Engine was about to answer
	response  uint32 // the answer
}

// pending returns the events of an earlier Engine, and the slots without an event.
func (r *ring) pending() (list []pending, free []int) {
	for i := range ringSlots {
		state := atomic.LoadUint32(r.word(i, slotState))
		read := binary.NativeEndian.Uint32(r.slot(i)) > 0
		ev, err := r.event(i)
		if state == slotFree || !read || err != nil {
			r.end(i)
			free = append(free, i)
			continue
		}
		list = append(list, pending{ev, state == slotAnswering, atomic.LoadUint32(r.word(i, slotResponse))})
	}
	return list, free
}
