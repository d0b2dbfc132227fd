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
		ids, err := idsOf(data)
		for _, id := range ids {
			highest = max(highest, id)
		}
		return err
	})
	return highest, err
}

// idsOf returns the IDs in an entry of a process. It leaves out the ID of a single thread: that is
// the process ID of a process that runs, and uninitialized memory of CRIU for a zombie.
func idsOf(entry []byte) ([]int, error) {
	var ids, threads []int
	for len(entry) > 0 {
		// The fields up to the threads are such IDs. CRIU does not pack the threads.
		number, kind, n := protowire.ConsumeTag(entry)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		entry = entry[n:]
		const threadIDs = 5
		to := &ids
		if number == threadIDs {
			to = &threads
		}
		if kind == protowire.VarintType && number <= threadIDs {
			var id uint64
			id, n = protowire.ConsumeVarint(entry)
			*to = append(*to, int(int32(id))) // -1 is the group of an ended process
		} else {
			n = protowire.ConsumeFieldValue(number, kind, entry)
		}
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		entry = entry[n:]
	}
	if len(threads) > 1 {
		ids = append(ids, threads...)
	}
	return ids, nil
}
