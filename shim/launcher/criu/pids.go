package criu

import (
	"fmt"

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
	err := eachField(entry, func(f field) error {
		// The fields up to the threads are such IDs. CRIU does not pack the threads.
		const threadIDs = 5
		id := int(int32(f.integer())) // -1 is the group of an ended process
		switch {
		case f.kind != varintKind || f.number > threadIDs:
		case f.number == threadIDs:
			threads = append(threads, id)
		default:
			ids = append(ids, id)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(threads) > 1 {
		ids = append(ids, threads...)
	}
	return ids, nil
}
