package criu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"berth/internal/safefs"
)

// Magics of CRIU's images (criu/include/magic.h), and limits.
const (
	commonMagic  = 0x54564319
	mountsMagic  = 0x55563928
	treeMagic    = 0x50273030
	coreMagic    = 0x55053847
	memoryMagic  = 0x57492820
	pagemapMagic = 0x56084025
	maxEntry     = 8 << 20 // bytes of an entry
	maxEntries   = 1 << 20 // of an image
)

// Names of images.
const (
	treeImage    = "pstree.img"
	mountsPrefix = "mountpoints-"
)

// fields are the fields of a message by number. The last value of a scalar field counts. If a field
// has several nested messages, they count as one message, whose encoding is the concatenation of
// all. The specification of protobuf says so, and CRIU's decoder does the same.
type fields struct {
	numbers  map[int]uint64
	texts    map[int][]byte
	messages map[int][]byte
}

// decode decodes a message, but not its nested messages.
func decode(data []byte) (fields, error) {
	all := fields{map[int]uint64{}, map[int][]byte{}, map[int][]byte{}}
	return all, eachField(data, func(f field) error {
		switch f.kind {
		case varintKind:
			all.numbers[f.number] = f.integer()
		case bytesKind:
			all.texts[f.number] = f.content
			all.messages[f.number] = append(all.messages[f.number], f.content...)
		}
		return nil
	})
}

// eachEntry calls do with the fields of each entry of an image.
func eachEntry(dir *safefs.Dir, name string, magic uint32, do func(fields) error) error {
	return eachMessage(dir, name, magic, func(data []byte) error {
		f, err := decode(data)
		if err != nil {
			return err
		}
		return do(f)
	})
}

// eachMessage calls do with each entry of an image, and does not decode the entries.
func eachMessage(dir *safefs.Dir, name string, magic uint32, do func([]byte) error) error {
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
		if err == nil {
			err = do(data)
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
