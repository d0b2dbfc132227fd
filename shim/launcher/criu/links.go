package criu

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// Fields of a mount, and the number of the proc filesystem (criu/images/mnt.proto).
const (
	mountKind  = 1
	mountFlags = 5
	mountPoint = 7
	external   = 13 // the launcher supplies it (ext_mount)
	externalBy = 18 // the same (ext_key)
	procKind   = 1
)

// WithoutLinks returns the images of mounts in the directory images, by name. In the result each
// mount has the option nosymfollow, with which CRIU then mounts it. So CRIU follows no symbolic
// link in it. proc filesystems and the root filesystem keep their options.
//
// CRIU mounts the mounts that the launcher supplies, and then sets their options. It does not set
// them if another mount of the same files has equal options. So such mounts also get options that
// the kernel ignores, in different combinations.
func WithoutLinks(images *os.File) (map[string][]byte, error) {
	dir, err := safefs.OpenDir(images, "")
	if err != nil {
		return nil, fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	changed, supplied := map[string][]byte{}, 0
	err = dir.EachName(func(name string) error {
		if !strings.HasPrefix(name, mountsPrefix) {
			return nil
		}
		out := binary.LittleEndian.AppendUint32(nil, commonMagic)
		out = binary.LittleEndian.AppendUint32(out, mountsMagic)
		err := eachMessage(dir, name, mountsMagic, func(data []byte) error {
			f, err := decode(data)
			if err != nil {
				return err
			}
			if f.numbers[mountKind] != procKind && string(f.texts[mountPoint]) != "/" {
				options := f.numbers[mountFlags] | unix.MS_NOSYMFOLLOW
				if f.numbers[external] != 0 || f.texts[externalBy] != nil {
					options |= combination(supplied)
					supplied++
				}
				// The last value of a field counts.
				data = appendInteger(data, mountFlags, options)
			}
			out = binary.LittleEndian.AppendUint32(out, uint32(len(data)))
			out = append(out, data...)
			return nil
		})
		changed[name] = out
		return err
	})
	return changed, err
}

// ignored are options of filesystems. The kernel ignores these options for a single mount
// (MS_REMOUNT with MS_BIND).
var ignored = []uint64{unix.MS_SYNCHRONOUS, unix.MS_MANDLOCK, unix.MS_DIRSYNC, unix.MS_SILENT, unix.MS_POSIXACL,
	unix.MS_I_VERSION, unix.MS_LAZYTIME}

// combination returns the nth combination of ignored options. They repeat after 128.
func combination(n int) (options uint64) {
	for i, option := range ignored {
		if n>>i&1 != 0 {
			options |= option
		}
	}
	return options
}
