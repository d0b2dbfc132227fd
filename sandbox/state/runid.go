package state

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// Run is one lifetime of the state directory, from its creation until it is emptied. It ends with
// the boot. If the node itself is a container (kind, LXC, nspawn), each restart of it also ends the
// run. The boot ID of the host stays the same.
type Run struct {
	ID  string // random; "" if it could not be written
	New bool   // the state directory was empty, without state of an earlier daemon

	// Adopted reports that an earlier version without IDs made the directory. Only such a run can
	// own records without an ID. The ID file stores it, because an adopting daemon may be killed
	// before it has marked all records.
	Adopted bool
}

// Has reports whether a record with this ID can belong to the run. Earlier versions recorded no ID.
func (r Run) Has(id string) bool { return id == r.ID || id == "" && r.Adopted }

const (
	// maxRunID bounds the size of the ID file in bytes.
	maxRunID = 64
	// adopted follows the ID in the file of an adopted directory.
	adopted = "adopted"
)

// ReadRun returns the run of the state directory, without an ID if the file is missing.
func (d Dirs) ReadRun() (Run, error) {
	data, err := safefs.ReadHostFile(d.RunID(), maxRunID)
	if errors.Is(err, fs.ErrNotExist) {
		return Run{}, nil
	}
	if err != nil {
		return Run{}, fmt.Errorf("read the ID of the state directory: %w", err)
	}
	id, mark, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
	return Run{ID: id, Adopted: mark == adopted}, nil
}

// OpenRun returns the run of the state directory, which must exist. It writes a new ID if the file
// is missing. It must be called before Prepare. A directory that has subdirectories but no ID
// counts as one of an earlier version. On a full or read-only filesystem the ID stays empty.
func (d Dirs) OpenRun() (Run, error) {
	run, err := d.ReadRun()
	if err != nil || run.ID != "" {
		return run, err
	}
	_, err = os.Lstat(d.Shim(""))
	run.New = errors.Is(err, fs.ErrNotExist)
	run.Adopted = !run.New
	if err != nil && !run.New {
		return Run{}, fmt.Errorf("stat the shim directories: %w", err)
	}
	run.ID = rand.Text()
	err = d.writeRun(run)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EROFS) {
		run.ID = ""
		return run, nil
	}
	if err != nil {
		return Run{}, fmt.Errorf("write the ID of the state directory: %w", err)
	}
	return run, nil
}

// writeRun writes the ID file atomically.
func (d Dirs) writeRun(run Run) error {
	content := run.ID + "\n"
	if run.Adopted {
		content = run.ID + " " + adopted + "\n"
	}
	return replaceFile(d.RunID(), []byte(content))
}

// replaceFile writes a file atomically.
func replaceFile(path string, content []byte) error {
	draft := path + ".tmp"
	failpoint.Reach("layout.write-file")
	err := os.WriteFile(draft, content, 0o600)
	failpoint.Reach("layout.file-written")
	if err != nil {
		return err
	}
	failpoint.Reach("layout.place-file")
	err = os.Rename(draft, path)
	failpoint.Reach("layout.file-placed")
	return err
}

// HasState reports whether the state directory contains a launch of the object.
func (d Dirs) HasState(id string) (bool, error) {
	_, err := os.Lstat(d.Shim(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("stat the shim directory of %s: %w", id, err)
	}
	return true, nil
}
