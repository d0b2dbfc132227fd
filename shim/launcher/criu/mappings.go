package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"sort"
	"strings"

	"berth/internal/safefs"
)

// mapping is a mapping of a process, or a range of guard pages in one.
type mapping struct {
	start, end uint64
	flags      uint64 // MAP_SHARED and others
	status     uint64 // the bits below
}

// Bits of a mapping's status (criu/include/image.h). CRIU uses others while it runs only.
const (
	areaRegular  = 1 << 0
	areaVsyscall = 1 << 2
	areaVDSO     = 1 << 3
	anonPrivate  = 1 << 9
	areaVVAR     = 1 << 12
	areaGuard    = 1 << 16
	// regular, stack, vsyscall, vDSO, heap, four kinds of files and memory, VVAR, ring of AIO,
	// memfd, shadow stack, guard. Not: System V memory, sockets, uprobes.
	knownStatus = areaRegular | 1<<1 | areaVsyscall | areaVDSO | 1<<5 | 1<<6 | 1<<7 | 1<<8 | anonPrivate | areaVVAR |
		1<<13 | 1<<14 | 1<<15 | areaGuard
)

const mapShared = 1 // MAP_SHARED

// Addresses of mappings.
const (
	mostAddress   = 1<<56 - 4096 // with five levels of page tables
	vsyscallStart = math.MaxUint64 - 10<<20 + 1
)

func readMappings(dir *safefs.Dir, pid uint32) (all []mapping, err error) {
	const vmas = 14
	err = eachMessage(dir, fmt.Sprintf("mm-%d.img", pid), memoryMagic, func(data []byte) error {
		return eachOf(data, vmas, func(entry []byte) error {
			const start, end, flags, status = 1, 2, 6, 7
			f, err := decode(entry)
			n := f.numbers
			all = append(all, mapping{n[start], n[end], n[flags], n[status]})
			return err
		})
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, refused("it has no image of its memory")
	}
	return all, err
}

// checkOrder checks that mappings are ascending, disjoint, in the range of addresses and of known
// kinds. The mapping of vsyscall is the last, and ranges of guard pages follow all mappings.
func checkOrder(all []mapping, pageSize uint64) error {
	var before mapping // of the same list
	guards := false
	for _, v := range all {
		place := fmt.Sprintf("the mapping at %#x", v.start)
		if guard := v.status&areaGuard != 0; guard != guards {
			if !guard {
				return refused("%s follows guard pages", place)
			}
			guards, before = true, mapping{}
		}
		first, last := pageSize, uint64(mostAddress)
		if v.status&areaVsyscall != 0 {
			first, last = vsyscallStart, vsyscallStart+pageSize
		}
		switch {
		case v.status&^knownStatus != 0:
			return refused("%s has the unknown status %#x", place, v.status)
		case v.start >= v.end || v.start%pageSize != 0 || v.end%pageSize != 0 ||
			v.start < first && v.start != 0 || v.end > last:
			return refused("%s ends at %#x: no such range of addresses is possible", place, v.end)
		case v.start < before.end:
			return refused("%s is not behind the one before it, which ends at %#x", place, before.end)
		case guards && v.status != areaGuard && v.status != areaGuard|areaRegular:
			return refused("%s is of guard pages and of another kind: status %#x", place, v.status)
		}
		before = v
	}
	return nil
}

// find returns the mapping that contains a range; nil if there is none.
func find(all []mapping, start, size uint64) *mapping {
	for i, v := range all {
		if v.status&areaGuard == 0 && v.start <= start && start < v.end && size <= v.end-start {
			return &all[i]
		}
	}
	return nil
}

// pages is the saved content of a process's private memory.
type pages struct {
	size uint64 // of a page
	runs []run
	file *os.File // nil: no page is saved
}

// run is a range of saved pages.
type run struct {
	start, end uint64
	offset     int64 // offset in the file; -1: not in the file
}

func openPages(dir *safefs.Dir, pid uint32, pageSize uint64) (*pages, error) {
	m, id, offset := &pages{size: pageSize}, uint64(0), int64(0)
	first := true
	err := eachEntry(dir, fmt.Sprintf("pagemap-%d.img", pid), pagemapMagic, func(f fields) (err error) {
		if first {
			first, id = false, f.numbers[1]
			return nil
		}
		offset, err = m.add(f, offset)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil || offset == 0 {
		return m, err
	}
	m.file, err = dir.OpenRegular(fmt.Sprintf("pages-%d.img", id), os.O_RDONLY)
	return m, err
}

// add adds an entry of a pagemap. The entry's pages are at an offset of the file. It returns the
// next offset.
func (m *pages) add(f fields, offset int64) (next int64, err error) {
	const address, count, inParent, flags, longCount = 1, 2, 3, 4, 5
	const parent, present = 1, 4 // flags
	n := f.numbers[count]
	if long, has := f.numbers[longCount]; has {
		n = long
	}
	have, hasFlags := f.numbers[flags]
	start := f.numbers[address]
	if f.numbers[inParent] != 0 || have&parent != 0 {
		return 0, refused("its memory is in another checkpoint")
	}
	end := start + n*m.size
	if n == 0 || n > mostAddress/m.size || start > mostAddress || end > mostAddress ||
		len(m.runs) > 0 && start < m.runs[len(m.runs)-1].end {
		return 0, refused("the pages at %#x are not in order", start)
	}
	if hasFlags && have&present == 0 {
		m.runs = append(m.runs, run{start, end, -1})
		return offset, nil
	}
	m.runs = append(m.runs, run{start, end, offset})
	return offset + int64(n*m.size), nil
}

// read returns saved bytes. Pages that are not saved are zero, and then complete is false.
func (m *pages) read(at, size uint64) (data []byte, complete bool, err error) {
	data, complete = make([]byte, size), true
	for have := uint64(0); have < size; {
		place := at + have
		step := min(size-have, m.size-place%m.size)
		offset := m.offset(place)
		if offset < 0 {
			complete = false
		} else if _, err := m.file.ReadAt(data[have:have+step], offset); err != nil {
			return nil, false, fmt.Errorf("read saved memory: %w", err)
		}
		have += step
	}
	return data, complete, nil
}

// offset returns the offset of an address in the file, or -1 if it is not there.
func (m *pages) offset(at uint64) int64 {
	i := sort.Search(len(m.runs), func(i int) bool { return m.runs[i].end > at })
	if i == len(m.runs) || at < m.runs[i].start || m.runs[i].offset < 0 {
		return -1
	}
	return m.runs[i].offset + int64(at-m.runs[i].start)
}

func (m *pages) close() {
	if m.file != nil {
		_ = m.file.Close() // it was only read
	}
}

// eachOf calls do with each message of a repeated field.
func eachOf(data []byte, number int, do func([]byte) error) error {
	return eachField(data, func(f field) error {
		if f.number != number || f.kind != bytesKind {
			return nil
		}
		return do(f.content)
	})
}

// VDSO returns the content of this kernel's vDSO, which every process has; nil if it has none.
func VDSO() ([]byte, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(maps)) {
		if !strings.HasSuffix(strings.TrimSpace(line), " [vdso]") {
			continue
		}
		var start, end uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &start, &end); err != nil {
			return nil, fmt.Errorf("find the vDSO: %w", err)
		}
		memory, err := os.Open("/proc/self/mem")
		if err != nil {
			return nil, err
		}
		defer memory.Close() // it was only read
		content := make([]byte, end-start)
		if _, err := memory.ReadAt(content, int64(start)); err != nil {
			return nil, fmt.Errorf("read the vDSO: %w", err)
		}
		return content, nil
	}
	return nil, nil
}
