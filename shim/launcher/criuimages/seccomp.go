package criuimages

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"berth/internal/safefs"
)

// Filters are the numbers of seccomp filters by the thread's ID in the container's PID namespace. A
// thread that shares the filters of its process's first thread is not in it.
type Filters map[int]int

// filter is an entry of the list of filters.
type filter struct {
	program []byte // struct sock_filter, little-endian
	prev    int    // index of the filter that was loaded before; -1: none
}

// CheckFilters checks that the first filter of each thread in the CRIU images in the directory
// images is one of permitted, in the form of struct sock_filter. A process may have loaded more
// filters, which can only forbid more. Threads without filters are no error: the caller looks at
// the restored threads, too. The error is a Refused for another filter.
func CheckFilters(images *os.File, permitted [][]byte) (Filters, error) {
	dir, err := safefs.OpenDir(images, "")
	if err != nil {
		return nil, fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	list, err := readFilters(dir)
	if err != nil {
		return nil, err
	}
	counts := Filters{}
	err = dir.EachName(func(name string) error {
		thread, ok := threadOf(name)
		if !ok {
			return nil
		}
		last, err := lastFilter(dir, name)
		if err != nil || last < 0 {
			return err
		}
		n, first := chain(list, last)
		if n == 0 || !slices.ContainsFunc(permitted, func(p []byte) bool { return bytes.Equal(p, first) }) {
			return &Refused{fmt.Sprintf("thread %d has another seccomp filter than the container's spec", thread)}
		}
		counts[thread] = n
		return nil
	})
	return counts, err
}

// threadOf returns the ID of the thread that an image describes.
func threadOf(name string) (int, bool) {
	rest, isCore := strings.CutPrefix(name, corePrefix)
	number, isImage := strings.CutSuffix(rest, imageSuffix)
	thread, err := strconv.Atoi(number)
	return thread, isCore && isImage && err == nil && strconv.Itoa(thread) == number
}

// readFilters returns the list of filters, which may be missing.
func readFilters(dir *safefs.Dir) (list []filter, err error) {
	const filters, program, prev = 1, 1, 2
	err = eachMessage(dir, filtersImage, filtersMagic, func(data []byte) error {
		return eachOf(data, filters, func(entry []byte) error {
			f, err := decode(entry)
			if err != nil {
				return err
			}
			before, has := f.numbers[prev]
			next := filter{program: f.texts[program], prev: -1}
			if has {
				next.prev = int(uint32(before))
			}
			list = append(list, next)
			return nil
		})
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return list, err
}

// eachOf calls do with each message of a repeated field.
func eachOf(data []byte, field protowire.Number, do func([]byte) error) error {
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return protowire.ParseError(n)
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(number, kind, data); n < 0 {
			return protowire.ParseError(n)
		}
		if number == field && kind == protowire.BytesType {
			entry, _ := protowire.ConsumeBytes(data)
			if err := do(entry); err != nil {
				return err
			}
		}
		data = data[n:]
	}
	return nil
}

// lastFilter returns the index of the last filter of a thread; -1: it has none. CRIU before 3.13
// stored it elsewhere, and later ones prefer that place.
func lastFilter(dir *safefs.Dir, name string) (last int, err error) {
	const task, thread, mode, index, filtered = 3, 5, 11, 12, 2
	last = -1
	err = eachEntry(dir, name, coreMagic, func(f fields) error {
		old, err := decode(f.messages[task])
		if err != nil {
			return err
		}
		for _, field := range []protowire.Number{mode, index} {
			if _, has := old.numbers[field]; has {
				return &Refused{fmt.Sprintf("%s has a seccomp filter in the form of an old CRIU", name)}
			}
		}
		t, err := decode(f.messages[thread])
		if err != nil {
			return err
		}
		if uint32(t.numbers[mode]) == filtered {
			last = int(uint32(t.numbers[index]))
		}
		return nil
	})
	return last, err
}

// chain returns the number of filters in the chain that ends with an index, and the first one. The
// number is 0 for a chain that does not end.
func chain(list []filter, last int) (n int, first []byte) {
	for last >= 0 && last < len(list) && n < len(list) {
		n++
		if list[last].prev < 0 {
			return n, list[last].program
		}
		last = list[last].prev
	}
	return 0, nil
}
