package deleted

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"berth/internal/safefs"
)

// Magics of CRIU's images (criu/include/magic.h).
const (
	commonMagic  = 0x54564319
	remapsMagic  = 0x59133954
	filesMagic   = 0x56303138
	mountsMagic  = 0x55563928
	maxEntry     = 1 << 20 // bytes of an entry
	maxEntries   = 1 << 20 // of an image
	ofProcess    = 2       // REMAP_TYPE__PROCFS: a file of a dead process; CRIU creates nothing
	remapsImage  = "remap-fpath.img"
	filesImage   = "files.img"
	mountsPrefix = "mountpoints-"
)

// file is a file of the images that has a path.
type file struct {
	id    uint64
	path  string
	mount uint64
}

// fields are the scalar fields of a message by number. The last value of a field counts.
type fields struct {
	numbers map[protowire.Number]uint64
	texts   map[protowire.Number][]byte
}

// decode decodes a message without its nested messages.
func decode(data []byte) (fields, error) {
	f := fields{map[protowire.Number]uint64{}, map[protowire.Number][]byte{}}
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return f, protowire.ParseError(n)
		}
		data = data[n:]
		switch kind {
		case protowire.VarintType:
			f.numbers[number], n = protowire.ConsumeVarint(data)
		case protowire.BytesType:
			var text []byte
			text, n = protowire.ConsumeBytes(data)
			f.texts[number] = text
		default:
			n = protowire.ConsumeFieldValue(number, kind, data)
		}
		if n < 0 {
			return f, protowire.ParseError(n)
		}
		data = data[n:]
	}
	return f, nil
}

// readRemaps returns the IDs of the files that CRIU creates, links or removes.
func readRemaps(dir *safefs.Dir) (map[uint64]bool, error) {
	const original, target, kind = 1, 2, 3
	ids := map[uint64]bool{}
	err := eachEntry(dir, remapsImage, remapsMagic, func(f fields) error {
		of, hasKind := f.numbers[kind]
		if of == ofProcess {
			return nil
		}
		ids[uint64(uint32(f.numbers[original]))] = true
		if hasKind && of == 0 { // REMAP_TYPE__LINKED: the target is a file, too
			ids[uint64(uint32(f.numbers[target]))] = true
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return ids, err
}

// readFiles returns the files with the IDs.
func readFiles(dir *safefs.Dir, ids map[uint64]bool) (files []file, err error) {
	const id, regular, name, mount = 2, 3, 6, 7
	err = eachEntry(dir, filesImage, filesMagic, func(f fields) error {
		of := uint64(uint32(f.numbers[id]))
		if !ids[of] || f.texts[regular] == nil {
			return nil
		}
		r, err := decode(f.texts[regular])
		if err != nil {
			return err
		}
		files = append(files, file{of, string(r.texts[name]), uint64(protowire.DecodeZigZag(r.numbers[mount]))})
		return nil
	})
	return files, err
}

// readMounts returns the mount points by the mounts' IDs.
func readMounts(dir *safefs.Dir) (map[uint64][]string, error) {
	const id, at = 2, 7
	mounts := map[uint64][]string{}
	err := dir.EachName(func(name string) error {
		if !strings.HasPrefix(name, mountsPrefix) {
			return nil
		}
		return eachEntry(dir, name, mountsMagic, func(f fields) error {
			of := uint64(uint32(f.numbers[id]))
			mounts[of] = append(mounts[of], string(f.texts[at]))
			return nil
		})
	})
	return mounts, err
}

// eachEntry calls do with each entry of an image.
func eachEntry(dir *safefs.Dir, name string, magic uint32, do func(fields) error) error {
	image, err := dir.OpenRegular(name, os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("open image of a checkpoint: %w", err)
	}
	defer image.Close() // it was only read
	r := bufio.NewReader(image)
	var head [2]uint32
	if err := binary.Read(r, binary.LittleEndian, &head); err != nil || head != [2]uint32{commonMagic, magic} {
		return fmt.Errorf("image %s of a checkpoint: wrong magic %#x", name, head)
	}
	for i := 0; ; i++ {
		data, err := next(r)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil && i == maxEntries {
			err = fmt.Errorf("more than %d entries", maxEntries)
		}
		var f fields
		if err == nil {
			f, err = decode(data)
		}
		if err == nil {
			err = do(f)
		}
		if err != nil {
			return fmt.Errorf("image %s of a checkpoint: entry %d: %w", name, i, err)
		}
	}
}

// next reads an entry. It returns io.EOF itself at the end of the image.
func next(r io.Reader) ([]byte, error) {
	var size uint32
	if err := binary.Read(r, binary.LittleEndian, &size); err != nil {
		return nil, err
	}
	if size > maxEntry {
		return nil, fmt.Errorf("an entry of %d bytes exceeds the limit", size)
	}
	data := make([]byte, size)
	if _, err := io.ReadFull(r, data); err != nil {
		return nil, fmt.Errorf("truncated: %w", io.ErrUnexpectedEOF)
	}
	return data, nil
}
