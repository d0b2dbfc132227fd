package shim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
)

// KeptFiles returns the files that a launcher or monitor of an earlier daemon holds open (see
// proto.FirstKeptFD), in order. It asks the processes of the shim directories below root, and
// returns the files of the first process that has them. It returns nil if no process has them.
// isKept checks the first file, because an earlier version may use the number for something else.
// The caller owns the files.
//
// It needs the privilege to trace processes. A process that cannot be asked is skipped. If no other
// process has the files, its error is returned.
func KeptFiles(root string, isKept func(*os.File) bool) ([]*os.File, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find files kept open by shims: %w", err)
	}
	var failed error
	for _, e := range entries {
		files, err := keptBy(filepath.Join(root, e.Name()))
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("files kept open by the shim of %s: %w", e.Name(), err))
		}
		if len(files) == 0 {
			continue
		}
		if isKept(files[0]) {
			return files, nil
		}
		failed = errors.Join(failed, closeFiles(files))
	}
	return nil, failed
}

// keptBy returns the kept files of the shim in a directory, or nil.
func keptBy(dir string) (files []*os.File, err error) {
	ids, err := ReadShim(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && ids.MonitorPID == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	process, err := pidfd.OpenVerified(ids.MonitorPID, ids.MonitorStartTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer process.Close()
	for i := range proto.KeptFDs {
		f, err := pidfd.GetFile(process, proto.FirstKeptFD+i, "kept")
		if errors.Is(err, unix.EBADF) || errors.Is(err, os.ErrProcessDone) {
			return nil, closeFiles(files)
		}
		if err != nil {
			return nil, errors.Join(err, closeFiles(files))
		}
		files = append(files, f)
	}
	return files, nil
}
