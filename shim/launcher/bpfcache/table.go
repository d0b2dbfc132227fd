package bpfcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Table holds the filters of all launchers of a daemon. The launchers inherit its memory from the
// daemon. No other process can access it. It is not safe for concurrent use within a process.
type Table struct{ f *os.File }

// NewTable returns the table in shared memory, which may be empty.
func NewTable(f *os.File) *Table { return &Table{f} }

// The format of a table, in the machine's byte order. A launcher may be killed at any time, so it
// writes the end last.
//
//	0  end of the last entry (uint64), 0 if there is none
//	8  entries: key, length of the filter (uint64), filter
const (
	tableHead = 8
	entryHead = len(key{}) + 8
	maxTable  = 1 << 20 // about 60 profiles like RuntimeDefault
)

// find returns the encoded filter with the key, or nil if the table lacks it or is damaged.
func (t *Table) find(k key) ([]byte, error) {
	end, err := t.end()
	if err != nil {
		return nil, err
	}
	for at := int64(tableHead); at+int64(entryHead) <= end; {
		var head [entryHead]byte
		if err := t.read(head[:], at); err != nil {
			return nil, err
		}
		size := binary.NativeEndian.Uint64(head[len(k):])
		at += int64(entryHead)
		if size == 0 || size > uint64(end-at) {
			break // another launcher has emptied the table
		}
		if key(head[:len(k)]) == k {
			return t.readFilter(at, size)
		}
		at += int64(size)
	}
	return nil, nil
}

func (t *Table) readFilter(at int64, size uint64) ([]byte, error) {
	encoded := make([]byte, size)
	if err := t.read(encoded, at); err != nil {
		return nil, err
	}
	if _, err := decode(encoded); err != nil {
		return nil, nil // another launcher has overwritten it
	}
	return encoded, nil
}

// end returns the offset of the end of the last entry.
func (t *Table) end() (int64, error) {
	var head [tableHead]byte
	if err := t.read(head[:], 0); err != nil {
		return 0, err
	}
	end := binary.NativeEndian.Uint64(head[:])
	if end < tableHead || end > maxTable {
		return tableHead, nil
	}
	return int64(end), nil
}

func (t *Table) read(b []byte, at int64) error {
	if _, err := t.f.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) { // the missing part of a short table reads as zeros
		return fmt.Errorf("read the table of seccomp filters: %w", err)
	}
	return nil
}

// add adds an encoded filter unless another launcher is writing. It empties a full table first.
func (t *Table) add(k key, encoded []byte) (err error) {
	if len(encoded) > maxTable/4 {
		return nil
	}
	locked, err := t.lock(unix.F_WRLCK)
	if err != nil || !locked {
		return err
	}
	defer func() {
		_, unlockErr := t.lock(unix.F_UNLCK)
		err = errors.Join(err, unlockErr)
	}()
	if found, err := t.find(k); err != nil || found != nil { // added by another launcher
		return err
	}
	end, err := t.end()
	if err != nil {
		return err
	}
	if end+int64(entryHead+len(encoded)) > maxTable {
		end = tableHead
		if err := t.write(binary.NativeEndian.AppendUint64(nil, uint64(end)), 0); err != nil {
			return err
		}
	}
	entry := append(make([]byte, 0, entryHead+len(encoded)), k[:]...)
	entry = append(binary.NativeEndian.AppendUint64(entry, uint64(len(encoded))), encoded...)
	if err := t.write(entry, end); err != nil {
		return err
	}
	return t.write(binary.NativeEndian.AppendUint64(nil, uint64(end)+uint64(len(entry))), 0)
}

func (t *Table) write(b []byte, at int64) error {
	if _, err := t.f.WriteAt(b, at); err != nil {
		return fmt.Errorf("write the table of seccomp filters: %w", err)
	}
	return nil
}

// lock takes or releases the write lock without waiting. It is a lock of the process (F_SETLK),
// since the launchers share one open file. The kernel releases it when the process dies.
func (t *Table) lock(kind int16) (locked bool, err error) {
	err = unix.FcntlFlock(t.f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: kind})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock the table of seccomp filters: %w", err)
	}
	return true, nil
}
