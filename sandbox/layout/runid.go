package layout

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

// Run is one life of the state directory: from the moment it was made until it is emptied. It ends with the boot, and with each
// restart of a node that is a container itself (kind, LXC, nspawn), which keeps the boot ID of its host.
type Run struct {
	ID  string // random; "" if it could not be written down
	New bool   // the state directory was empty: nothing of an earlier daemon is in it
}

// maxRunID is more than an ID has, in bytes.
const maxRunID = 64

// ReadRunID returns the ID of the state directory's run, "" if there is none. It changes nothing.
func (d Dirs) ReadRunID() (string, error) {
	data, err := safefs.ReadHostFile(d.RunID(), maxRunID)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the ID of the state directory: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// OpenRun returns the run of the state directory, which must exist. It writes a new ID where there is none; call it before
// Prepare. A directory of an earlier version has no ID, but folders: it is not new. On a filesystem that is full or read-only
// the ID stays empty.
func (d Dirs) OpenRun() (Run, error) {
	id, err := d.ReadRunID()
	if err != nil || id != "" {
		return Run{ID: id}, err
	}
	_, err = os.Lstat(d.Shim(""))
	isNew := errors.Is(err, fs.ErrNotExist)
	if err != nil && !isNew {
		return Run{}, fmt.Errorf("look at the state directory: %w", err)
	}
	id = rand.Text()
	err = d.writeRunID(id)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EROFS) {
		return Run{New: isNew}, nil
	}
	if err != nil {
		return Run{}, fmt.Errorf("write the ID of the state directory: %w", err)
	}
	return Run{ID: id, New: isNew}, nil
}

// writeRunID puts a file in place that has the whole ID.
func (d Dirs) writeRunID(id string) error {
	draft := d.RunID() + ".tmp"
	failpoint.Reach("layout.write-run-id")
	err := os.WriteFile(draft, []byte(id+"\n"), 0o600)
	failpoint.Reach("layout.run-id-written")
	if err != nil {
		return err
	}
	failpoint.Reach("layout.place-run-id")
	err = os.Rename(draft, d.RunID())
	failpoint.Reach("layout.run-id-placed")
	return err
}

// HasState tells whether something of a pod's or container's launch is in the state directory.
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
