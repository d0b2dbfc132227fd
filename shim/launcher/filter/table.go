package filter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Table has the memos of all launchers. It is memory that the daemon makes and all its launchers inherit; nobody else has it, and it goes
// with them. It is not safe for concurrent use within a process.
type Table struct{ f *os.File }

// NewTable makes a table of shared memory, which may be empty.
func NewTable(f *os.File) *Table { return &Table{f} }

// A table in bytes, in the machine's order. An entry counts when the end, which is written last, says so: a launcher may be
// killed at any time.
//
//	0  end of the last entry (uint64); 0: there is none
//	8  entries: key (uint64), length of the memo (uint64), memo
const (
	tableHead = 8
	entryHead = 16
	maxTable  = 1 << 20 // some 60 profiles like RuntimeDefault
)

// find returns the memo with the key, nil if there is none. A damaged table has none.
func (t *Table) find(key uint64) ([]byte, error) {
	end, err := t.end()
	if err != nil {
		return nil, err
	}
	for at := int64(tableHead); at+entryHead <= end; {
		var head [entryHead]byte
		if err := t.read(head[:], at); err != nil {
			return nil, err
		}
		size := binary.NativeEndian.Uint64(head[8:])
		at += entryHead
		if size == 0 || size > uint64(end-at) {
			break // another launcher has begun anew
		}
		if binary.NativeEndian.Uint64(head[:]) == key {
			return t.readMemo(at, size)
		}
		at += int64(size)
	}
	return nil, nil
}

func (t *Table) readMemo(at int64, size uint64) ([]byte, error) {
	memo := make([]byte, size)
	if err := t.read(memo, at); err != nil {
		return nil, err
	}
	if _, err := decode(memo); err != nil {
		return nil, nil // overwritten meanwhile
	}
	return memo, nil
}

// end returns where the last entry ends.
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
	if _, err := t.f.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) { // behind the end there are zeros
		return fmt.Errorf("read the table of seccomp filters: %w", err)
	}
	return nil
}

// add puts a memo into the table, unless another launcher is at it. A table that is full begins anew.
func (t *Table) add(key uint64, memo []byte) (err error) {
	if len(memo) > maxTable/4 {
		return nil
	}
	mine, err := t.lock(unix.F_WRLCK)
	if err != nil || !mine {
		return err
	}
	defer func() {
		_, unlockErr := t.lock(unix.F_UNLCK)
		err = errors.Join(err, unlockErr)
	}()
	if found, err := t.find(key); err != nil || found != nil { // meanwhile
		return err
	}
	end, err := t.end()
	if err != nil {
		return err
	}
	if end+entryHead+int64(len(memo)) > maxTable {
		end = tableHead
		if err := t.write(binary.NativeEndian.AppendUint64(nil, uint64(end)), 0); err != nil {
			return err
		}
	}
	entry := binary.NativeEndian.AppendUint64(make([]byte, 0, entryHead+len(memo)), key)
	entry = append(binary.NativeEndian.AppendUint64(entry, uint64(len(memo))), memo...)
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

// lock takes or gives back the right to write. It is this process's: the launchers have one open file together, and the
// kernel gives the lock back when its owner is killed.
func (t *Table) lock(kind int16) (mine bool, err error) {
	err = unix.FcntlFlock(t.f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: kind})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock the table of seccomp filters: %w", err)
	}
	return true, nil
}
