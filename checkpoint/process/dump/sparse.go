package dump

import (
	"archive/tar"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// segment is a part of a file that has data.
type segment struct{ offset, length int64 }

const (
	// smallHole is the size of holes, in bytes, that are not worth a sparse file.
	smallHole = 64 << 10
	// maxSegments limits the map of a sparse file. Readers limit it, too (Go's archive/tar: 1 MiB).
	maxSegments = 20000
)

// dataSegments returns the parts of a file that have data, nil if the file is not sparse.
func dataSegments(f *os.File, st unix.Stat_t) ([]segment, error) {
	if st.Size-st.Blocks*512 < smallHole {
		return nil, nil
	}
	segments := []segment{}
	for at := int64(0); at < st.Size; {
		begin, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // only a hole is left
		}
		if err != nil {
			return nil, os.NewSyscallError("lseek(SEEK_DATA)", err)
		}
		if begin >= st.Size { // the file has grown
			break
		}
		end, err := unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return nil, os.NewSyscallError("lseek(SEEK_HOLE)", err)
		}
		end = min(end, st.Size)
		if len(segments) == maxSegments {
			return nil, nil
		}
		segments = append(segments, segment{begin, end - begin})
		at = end
	}
	return segments, nil
}

// sparse writes a sparse file in GNU's PAX format 1.0, which archive/tar reads but does not write.
// The content begins with the map of the segments.
func (t *tree) sparse(f *os.File, h *tar.Header, segments []segment) error {
	// GNU tar ends the map with an empty segment at the file's end.
	segments = append(segments, segment{h.Size, 0})
	text := fmt.Appendf(nil, "%d\n", len(segments))
	var data int64
	for _, s := range segments {
		text = fmt.Appendf(text, "%d\n%d\n", s.offset, s.length)
		data += s.length
	}
	text = blocked(text)
	if err := t.sparseHeader(h, int64(len(text))+data); err != nil {
		return err
	}
	if _, err := t.out.Write(text); err != nil {
		return err
	}
	for _, s := range segments {
		if err := t.copy(t.out, f, s.offset, s.length); err != nil {
			return err
		}
	}
	return zeros(t.out, (512-data%512)%512)
}

// sparseHeader writes the headers of a sparse file whose content in the tar has size bytes.
func (t *tree) sparseHeader(h *tar.Header, size int64) error {
	name := path.Join(path.Dir(h.Name), "GNUSparseFile.0", path.Base(h.Name))
	records := map[string]string{
		"path": name, "size": strconv.FormatInt(size, 10),
		"uid": strconv.Itoa(h.Uid), "gid": strconv.Itoa(h.Gid),
		"mtime":            fmt.Sprintf("%d.%09d", h.ModTime.Unix(), h.ModTime.Nanosecond()),
		"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
		"GNU.sparse.name": h.Name, "GNU.sparse.realsize": strconv.FormatInt(h.Size, 10),
	}
	maps.Copy(records, h.PAXRecords)
	var pax []byte
	for _, key := range slices.Sorted(maps.Keys(records)) {
		pax = append(pax, paxRecord(key, records[key])...)
	}
	blocks := ustar("PaxHeaders.0/sparse", tar.TypeXHeader, 0o644, int64(len(pax)))
	blocks = append(blocks, blocked(pax)...)
	blocks = append(blocks, ustar("GNUSparseFile.0", tar.TypeReg, h.Mode, size)...)
	_, err := t.out.Write(blocks)
	return err
}

// paxRecord returns a record with its length, which includes the digits of the length.
func paxRecord(key, value string) string {
	const padding = 3 // blank, equals sign, newline
	size := len(key) + len(value) + padding
	size += len(strconv.Itoa(size))
	record := fmt.Sprintf("%d %s=%s\n", size, key, value)
	if len(record) != size { // the length has one digit more
		record = fmt.Sprintf("%d %s=%s\n", len(record), key, value)
	}
	return record
}

// ustar returns a header block. PAX records override its fields.
func ustar(name string, kind byte, mode, size int64) []byte {
	block := make([]byte, 512)
	octal := func(at, digits int, n int64) {
		if n >= 1<<(3*digits) {
			n = 0 // the PAX record has it
		}
		copy(block[at:], fmt.Sprintf("%0*o", digits, n))
	}
	copy(block, name)
	octal(100, 7, mode)
	octal(108, 7, 0)
	octal(116, 7, 0)
	octal(124, 11, size)
	octal(136, 11, 0)
	block[156] = kind
	copy(block[257:], "ustar\x0000")
	copy(block[148:156], "        ")
	var sum int64
	for _, b := range block {
		sum += int64(b)
	}
	copy(block[148:], fmt.Sprintf("%06o\x00 ", sum))
	return block
}
