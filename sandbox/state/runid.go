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

// Run is one life of the state directory: from the moment it was made until it is emptied. It ends
// with the boot, and with each restart of a node that is a container itself (kind, LXC, nspawn),
// which keeps the boot ID of its host.
type Run struct {
	ID  string // random; "" if it could not be written down
	New bool   // the state directory was empty: nothing of an earlier daemon is in it

	// Adopted reports that an earlier version without IDs made the directory. Only such a run can
	// own records without an ID. The file holds it, because an adopting daemon may be killed before
	// it marked all records.
	Adopted bool
}

// Has reports whether a record with this ID may belong to the run. Earlier versions record no ID.
func (r Run) Has(id string) bool { return id == r.ID || id == "" && r.Adopted }

const (
	// maxRunID is more than the file has, in bytes.
	maxRunID = 64
	// adopted follows the ID in the file of a directory that was adopted.
	adopted = "adopted"
)

// ReadRun returns the run of the state directory, without an ID if it has none. It changes nothing.
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

// OpenRun returns the run of the state directory, which must exist. It writes a new ID where there
// is none; call it before Prepare. A directory of an earlier version has no ID, but folders: it is
// adopted, and not new. On a filesystem that is full or read-only the ID stays empty.
func (d Dirs) OpenRun() (Run, error) {
	run, err := d.ReadRun()
	if err != nil || run.ID != "" {
		return run, err
	}
	_, err = os.Lstat(d.Shim(""))
	run.New = errors.Is(err, fs.ErrNotExist)
	run.Adopted = !run.New
	if err != nil && !run.New {
		return Run{}, fmt.Errorf("look at the state directory: %w", err)
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

// writeRun puts a file in place that has the whole ID.
func (d Dirs) writeRun(run Run) error {
	content, draft := run.ID+"\n", d.RunID()+".tmp"
	if run.Adopted {
		content = run.ID + " " + adopted + "\n"
	}
	failpoint.Reach("layout.write-run-id")
	err := os.WriteFile(draft, []byte(content), 0o600)
	failpoint.Reach("layout.run-id-written")
	if err != nil {
		return err
	}
	failpoint.Reach("layout.place-run-id")
	err = os.Rename(draft, d.RunID())
	failpoint.Reach("layout.run-id-placed")
	return err
}

// HasState reports whether the state directory holds anything of the object's launch.
func (d Dirs) HasState(id string) (bool, error) {
	_, err := os.Lstat(d.Shim(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the shim directory of %s: %w", id, err)
	}
	return true, nil
}
