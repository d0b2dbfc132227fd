// Package blocklog is a block device that loses power on demand.
//
// A Disk keeps every write, in the order in which writes and flushes arrived. Cut returns the disk
// after a power failure at some point. That disk contains everything written before the last flush.
// Of later writes it contains any part, in any order, torn at any sector. Attach attaches a Disk to
// a loop device, for a filesystem.
//
// A Disk keeps its content in a file until Close. A cut copies nothing. It refers to the file of
// the original disk, which must be closed after it.
package blocklog

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
)

// Sector is the unit of atomic writes according to the ATA and SCSI standards, for disks without
// larger sectors.
const Sector = 512

// place is the location of a sector's content: a file of the disk and an offset. The zero value
// stands for a sector that was never written or was discarded. It reads as zeros.
type place struct {
	file   *os.File
	offset int64
}

// operation is a write, a discard (content.file is nil), or a flush (sectors is 0).
type operation struct {
	first, sectors int64
	content        place
}

// Disk is a disk of fixed size. Its methods may be called concurrently.
type Disk struct {
	file *os.File // contains writes to this disk; the disks it was cut from have other files
	base []place  // the content before the first operation of the log

	mu      sync.Mutex // protects the fields below
	sectors []place
	log     []operation
	end     int64 // of file
}

// New returns an empty disk of size bytes, a multiple of Sector, with its file in dir.
func New(dir string, size int64) (*Disk, error) {
	if size <= 0 || size%Sector != 0 {
		return nil, fmt.Errorf("disk size of %d bytes is no multiple of the sector size", size)
	}
	return newDisk(dir, make([]place, size/Sector))
}

func newDisk(dir string, sectors []place) (*Disk, error) {
	f, err := os.CreateTemp(dir, "disk-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Disk{file: f, base: sectors, sectors: slices.Clone(sectors)}, nil
}

// Close closes the disk and deletes its content.
func (d *Disk) Close() error { return d.file.Close() }

// Size returns the size in bytes.
func (d *Disk) Size() int64 { return int64(len(d.sectors)) * Sector }

// Position returns the number of operations so far. Cut takes such a number.
func (d *Disk) Position() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.log)
}

// Flushes returns the positions right after each flush.
func (d *Disk) Flushes() []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	var after []int
	for i, op := range d.log {
		if op.sectors == 0 {
			after = append(after, i+1)
		}
	}
	return after
}

// WriteAt implements io.WriterAt, for whole sectors.
func (d *Disk) WriteAt(p []byte, offset int64) (int, error) {
	first, count, err := d.span(offset, int64(len(p)))
	if err != nil || count == 0 {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.file.WriteAt(p, d.end); err != nil {
		return 0, err
	}
	op := operation{first, count, place{d.file, d.end}}
	d.end += int64(len(p))
	d.log = append(d.log, op)
	apply(d.sectors, op)
	return len(p), nil
}

// Discard makes whole sectors read as zeros.
func (d *Disk) Discard(offset, length int64) error {
	first, count, err := d.span(offset, length)
	if err != nil || count == 0 {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	op := operation{first: first, sectors: count}
	d.log = append(d.log, op)
	apply(d.sectors, op)
	return nil
}

// Flush makes all earlier writes durable.
func (d *Disk) Flush() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log = append(d.log, operation{})
}

// apply lets an operation take effect on sectors.
func apply(sectors []place, op operation) {
	for i := range op.sectors {
		at := op.content
		if at.file != nil {
			at.offset += i * Sector
		}
		sectors[op.first+i] = at
	}
}

// span returns the sectors of a range.
func (d *Disk) span(offset, length int64) (first, count int64, err error) {
	if offset < 0 || length < 0 || offset%Sector != 0 || length%Sector != 0 || offset+length > d.Size() {
		return 0, 0, fmt.Errorf("bytes %d to %d are not whole sectors of a disk of %d bytes", offset, offset+length, d.Size())
	}
	return offset / Sector, length / Sector, nil
}

// ReadAt implements io.ReaderAt, for whole sectors.
func (d *Disk) ReadAt(p []byte, offset int64) (int, error) {
	first, count, err := d.span(offset, int64(len(p)))
	if err != nil {
		return 0, err
	}
	d.mu.Lock()
	places := slices.Clone(d.sectors[first : first+count])
	d.mu.Unlock()
	for done := 0; done < len(places); {
		n := together(places[done:])
		part := p[done*Sector : (done+n)*Sector]
		if err := places[done].read(part); err != nil {
			return done * Sector, err
		}
		done += n
	}
	return len(p), nil
}

// together returns how many places, from the first one on, are contiguous.
func together(places []place) int {
	n := 1
	for n < len(places) && places[n] == places[0].plus(n) {
		n++
	}
	return n
}

func (p place) plus(sectors int) place {
	if p.file != nil {
		p.offset += int64(sectors) * Sector
	}
	return p
}

func (p place) read(into []byte) error {
	if p.file == nil {
		clear(into)
		return nil
	}
	n, err := p.file.ReadAt(into, p.offset)
	if n == len(into) {
		return nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// Loss describes the effect of a power failure on the writes since the last flush.
type Loss struct {
	// Kept is the share of these writes that reached the disk, from 0 to 1.
	Kept float64
	// Atomic is the number of bytes that are written as a unit, a multiple of Sector. Each unit,
	// aligned on the disk, is kept or lost independently.
	Atomic int64
}

// Cut returns the disk after a power failure at a position, with its file in dir. random selects
// the surviving writes since the last flush. The new disk's log is empty.
func (d *Disk) Cut(dir string, position int, loss Loss, random *rand.Rand) (*Disk, error) {
	if loss.Atomic <= 0 || loss.Atomic%Sector != 0 {
		return nil, fmt.Errorf("invalid atomic unit of %d bytes", loss.Atomic)
	}
	d.mu.Lock()
	if position < 0 || position > len(d.log) {
		d.mu.Unlock()
		return nil, fmt.Errorf("position %d is not in a log of %d operations", position, len(d.log))
	}
	log := d.log[:position] // operations never change
	d.mu.Unlock()
	sectors := slices.Clone(d.base)
	flushed := 0
	for i, op := range log {
		if op.sectors == 0 {
			flushed = i + 1
		}
	}
	for _, op := range log[:flushed] {
		apply(sectors, op)
	}
	for _, op := range log[flushed:] {
		for _, unit := range op.units(loss.Atomic / Sector) {
			if random.Float64() < loss.Kept {
				apply(sectors, unit)
			}
		}
	}
	return newDisk(dir, sectors)
}

// units splits an operation where it may be torn.
func (op operation) units(size int64) (units []operation) {
	for done := int64(0); done < op.sectors; {
		at := op.first + done
		n := min(size-at%size, op.sectors-done)
		units = append(units, operation{at, n, op.content.plus(int(done))})
		done += n
	}
	return units
}
