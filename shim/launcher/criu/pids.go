package criu

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"berth/internal/safefs"
)

// HighestPID returns the highest ID of a process, thread, process group or session in the CRIU
// images in a directory.
func HighestPID(images string) (highest int, err error) {
	root, err := safefs.OpenRoot(images)
	if err != nil {
		return 0, fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer root.Close() // it was only read
	dir, err := safefs.OpenDir(root, "")
	if err != nil {
		return 0, fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	err = eachMessage(dir, treeImage, treeMagic, func(data []byte) error {
		for len(data) > 0 {
			// The fields up to the threads are such IDs. CRIU does not pack the threads.
			number, kind, n := protowire.ConsumeTag(data)
			if n < 0 {
				return protowire.ParseError(n)
			}
			data = data[n:]
			const threads = 5
			switch {
			case kind == protowire.VarintType && number <= threads:
				var id uint64
				if id, n = protowire.ConsumeVarint(data); n >= 0 {
					highest = max(highest, int(int32(id))) // -1 is the group of an ended process
				}
			default:
				n = protowire.ConsumeFieldValue(number, kind, data)
			}
			if n < 0 {
				return protowire.ParseError(n)
			}
			data = data[n:]
		}
		return nil
	})
	return highest, err
}
