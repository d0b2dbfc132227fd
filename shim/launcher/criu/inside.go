package criu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"berth/internal/safefs"
)

const (
	inventoryImage = "inventory.img"
	filesImage     = "files.img"
	remapsImage    = "remap-fpath.img"
	firstIDs       = "ids-1.img" // of process 1
	inventoryMagic = 0x58313116
	filesMagic     = 0x56303138
	remapsMagic    = 0x59133954
	idsMagic       = 0x54432030
	rootIDs        = 3 // field of the inventory: the IDs of CRIU's own namespaces
	pidNamespace   = 5 // first field with the ID of a namespace (criu/images/core.proto)
)

// mountFields has the numbers of the fields with the ID of a mount. The key is the field of the
// file's kind in an entry (criu/images/fdinfo.proto): a regular file or a unix socket.
var mountFields = map[int]int{3: 7, 16: 17}

// Inside returns the changed images, by name, for a CRIU that runs in the container's own
// namespaces. CRIU makes a namespace only if the saved namespace of the processes differs from
// CRIU's saved own namespace. So the inventory names the container's namespaces as CRIU's own. The
// PID namespace is an exception, because CRIU must make it. Files have no mount, because CRIU then
// knows no mounts. The error has the type Refused if the container shared a PID namespace, or if a
// deleted file was open.
func Inside(images *os.File) (map[string][]byte, error) {
	dir, err := safefs.OpenDir(images, "")
	if err != nil {
		return nil, fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	if err := refuseDeleted(dir); err != nil {
		return nil, err
	}
	inventory, err := inventoryInside(dir)
	if err != nil {
		return nil, err
	}
	files, err := filesWithoutMounts(dir)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{inventoryImage: inventory, filesImage: files}, nil
}

// refuseDeleted refuses processes with an open file that was deleted. CRIU makes such a file again
// in the container's mount namespace, but deletes it in its own.
func refuseDeleted(dir *safefs.Dir) error {
	const kind, ghost = 3, 1
	err := eachEntry(dir, remapsImage, remapsMagic, func(f fields) error {
		if k, found := f.numbers[kind]; !found || k == ghost {
			return refused("a deleted file is open")
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func inventoryInside(dir *safefs.Dir) ([]byte, error) {
	var own []byte
	err := eachMessage(dir, firstIDs, idsMagic, func(data []byte) error {
		own = data
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, refused("it has no PID namespace of its own")
	}
	if err != nil {
		return nil, err
	}
	data, err := readInventory(dir)
	if err != nil {
		return nil, err
	}
	changed, err := replaceRootIDs(data, own)
	if err != nil {
		return nil, fmt.Errorf("image %s of a checkpoint: %w", inventoryImage, err)
	}
	return appendEntry(binary.LittleEndian.AppendUint32(nil, inventoryMagic), changed), nil
}

// filesWithoutMounts returns the image of files in which each file has the mount -1, which means
// none.
func filesWithoutMounts(dir *safefs.Dir) ([]byte, error) {
	out := binary.LittleEndian.AppendUint32(nil, commonMagic)
	out = binary.LittleEndian.AppendUint32(out, filesMagic)
	err := eachMessage(dir, filesImage, filesMagic, func(data []byte) error {
		var entry []byte
		err := eachField(data, func(f field) error {
			mount, found := mountFields[f.number]
			if !found {
				entry = append(entry, f.encoded...)
				return nil
			}
			const none = 1 // -1, as protobuf encodes signed integers
			// The last value of a field counts.
			value := appendInteger(slices.Clone(f.bytes()), mount, none)
			entry = appendBytes(entry, f.number, value)
			return nil
		})
		out = appendEntry(out, entry)
		return err
	})
	return out, err
}

// appendEntry adds an entry to an image.
func appendEntry(image, entry []byte) []byte {
	image = binary.LittleEndian.AppendUint32(image, uint32(len(entry)))
	return append(image, entry...)
}

// readInventory returns the only entry of the inventory. Unlike other images it has only one magic
// number.
func readInventory(dir *safefs.Dir) ([]byte, error) {
	image, err := dir.OpenRegular(inventoryImage, os.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("open image of a checkpoint: %w", err)
	}
	defer image.Close() // it was only read
	var magic uint32
	if err := binary.Read(image, binary.LittleEndian, &magic); err != nil || magic != inventoryMagic {
		return nil, fmt.Errorf("image %s of a checkpoint: wrong magic %#x", inventoryImage, magic)
	}
	data, err := next(io.LimitReader(image, maxEntry))
	if err != nil {
		return nil, fmt.Errorf("image %s of a checkpoint: %w", inventoryImage, err)
	}
	return data, nil
}

// replaceRootIDs replaces the IDs of namespaces in the field rootIDs of an inventory by those of a
// process.
func replaceRootIDs(inventory, process []byte) ([]byte, error) {
	var root bytes.Buffer
	out := make([]byte, 0, len(inventory)+len(process))
	err := eachField(inventory, func(f field) error {
		if f.number == rootIDs {
			root.Write(f.bytes())
			return nil
		}
		out = append(out, f.encoded...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = eachField(process, func(f field) error {
		if f.number > pidNamespace {
			root.Write(f.encoded) // the last value of a field counts
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return appendBytes(out, rootIDs, root.Bytes()), nil
}
