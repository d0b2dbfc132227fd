package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"berth/internal/safefs"
)

// Refused is the error for saved processes of an unusual form.
type Refused struct{ Reason string }

func (e *Refused) Error() string { return e.Reason }

func refused(format string, args ...any) error { return &Refused{fmt.Sprintf(format, args...)} }

// Check refuses saved processes of an unusual form, with an error of the type Refused. images is
// the directory of CRIU's images. vdso is the content of this kernel's vDSO, and pageSize its size
// of a page.
//
// The check is defence in depth, and gives no guarantee. CRIU's code runs as root in the memory of
// the saved processes, so whoever restores them trusts them. Check examines the data that CRIU uses
// there before the processes have only their own rights:
//
//   - The vDSO has the content of this kernel's.
//   - The areas of restartable sequences are private memory, and no sequence is in progress.
//   - The mappings are in the order that CRIU relies on, and of kinds that berth knows.
func Check(images *os.File, vdso []byte, pageSize int) error {
	dir, err := safefs.OpenDir(images, "")
	if err != nil {
		return fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	return eachMessage(dir, treeImage, treeMagic, func(data []byte) error {
		p, err := readProcess(data)
		if err != nil {
			return err
		}
		return p.check(dir, vdso, uint64(pageSize))
	})
}

// process is a process of the tree.
type process struct {
	pid     uint32
	threads []uint32 // including the ID of the PID namespace
}

func readProcess(data []byte) (process, error) {
	const pid, threads = 1, 5
	f, err := decode(data)
	p := process{pid: uint32(f.numbers[pid])}
	if err != nil {
		return p, err
	}
	return p, eachNumber(data, threads, func(id uint64) { p.threads = append(p.threads, uint32(id)) })
}

// States of a process without memory (criu/include/image.h).
const (
	taskDead   = 2
	taskZombie = 6
)

func (p process) check(dir *safefs.Dir, vdso []byte, pageSize uint64) error {
	leader, err := readCore(dir, p.pid)
	if err != nil {
		return err
	}
	if leader.state == taskDead || leader.state == taskZombie {
		return nil
	}
	all, err := readMappings(dir, p.pid)
	if err == nil {
		err = checkOrder(all, pageSize)
	}
	var m *pages
	if err == nil {
		m, err = openPages(dir, p.pid, pageSize)
	}
	if err != nil {
		return p.named(err)
	}
	defer m.close()
	if err := checkVDSO(all, m, vdso); err != nil {
		return p.named(err)
	}
	for _, id := range p.threads {
		t, err := readCore(dir, id)
		if err == nil {
			err = checkSequences(t, all, m)
		}
		if err != nil {
			return p.named(err)
		}
	}
	return nil
}

// named adds the process to the reason of a refusal.
func (p process) named(err error) error {
	if r := (*Refused)(nil); errors.As(err, &r) {
		return refused("process %d: %s", p.pid, r.Reason)
	}
	return err
}

// thread has the data of a thread for the check.
type thread struct {
	id                 uint32
	state              uint64 // of its process, in the image of the first thread
	area, size, active uint64 // of restartable sequences: address, length, the sequence in progress
}

func readCore(dir *safefs.Dir, id uint32) (thread, error) {
	const task, core, state, rseq = 3, 5, 1, 15
	const pointer, size, active = 1, 2, 4
	t, found := thread{id: id}, false
	err := eachEntry(dir, fmt.Sprintf("core-%d.img", id), coreMagic, func(f fields) error {
		found = true
		of, err := decode(f.messages[task])
		if err != nil {
			return err
		}
		t.state = of.numbers[state]
		own, err := decode(f.messages[core])
		if err != nil {
			return err
		}
		r, err := decode(own.messages[rseq])
		t.area, t.size, t.active = r.numbers[pointer], r.numbers[size], r.numbers[active]
		return err
	})
	if err == nil && !found || errors.Is(err, fs.ErrNotExist) {
		return t, refused("thread %d has no image", id)
	}
	return t, err
}

// Layout of struct rseq (rseq(2)): the field rseq_cs, and the least size of an area.
const (
	sequenceAt  = 8
	sequenceLen = 8
	leastArea   = 32
)

// checkSequences checks the area of restartable sequences of a thread.
func checkSequences(t thread, all []mapping, m *pages) error {
	if t.area == 0 {
		return nil
	}
	size := max(t.size, leastArea)
	in := find(all, t.area, size)
	if in == nil || in.status&(areaRegular|anonPrivate) != areaRegular|anonPrivate || in.status&(areaVDSO|areaVVAR) != 0 ||
		in.flags&mapShared != 0 {
		return refused("thread %d: its rseq area at %#x is not in one private anonymous mapping", t.id, t.area)
	}
	sequence, _, err := m.read(t.area+sequenceAt, sequenceLen)
	if err != nil {
		return err
	}
	if t.active != 0 || !isZero(sequence) {
		return refused("thread %d: a restartable sequence is in progress", t.id)
	}
	return nil
}

// checkVDSO checks that the process has the vDSO of this kernel, or none.
func checkVDSO(all []mapping, m *pages, vdso []byte) error {
	found := false
	for _, v := range all {
		if v.status&areaVDSO == 0 {
			continue
		}
		if found {
			return refused("it has two vDSOs")
		}
		found = true
		const wanted = areaRegular | areaVDSO | anonPrivate
		if v.status&anonPrivate == 0 || v.status&^wanted != 0 || v.end-v.start != uint64(len(vdso)) {
			return refused("its vDSO is not that of this kernel: status %#x, %d bytes", v.status, v.end-v.start)
		}
		have, complete, err := m.read(v.start, v.end-v.start)
		if err != nil {
			return err
		}
		if !complete || string(have) != string(vdso) {
			return refused("its vDSO is not that of this kernel")
		}
	}
	return nil
}

func isZero(data []byte) bool {
	for _, b := range data {
		if b != 0 {
			return false
		}
	}
	return true
}

// eachNumber calls do with each value of a repeated field of integers, packed or not.
func eachNumber(data []byte, number int, do func(uint64)) error {
	return eachField(data, func(f field) error {
		if f.number != number {
			return nil
		}
		for value := f.content; len(value) > 0; {
			v, n := binary.Uvarint(value)
			if n <= 0 {
				return errWire
			}
			do(v)
			value = value[n:]
		}
		return nil
	})
}
