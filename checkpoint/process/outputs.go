package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"berth/checkpoint/process/archive"
	"berth/checkpoint/record"
	"berth/internal/errdefs"
)

// outputRecord says which directory of a client a checkpoint of a pod fills. A daemon that dies
// meanwhile leaves it to the next one, which empties the directory unless the checkpoint is
// complete.
type outputRecord struct {
	Path  string `json:"path"`
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
}

const (
	outputKind    = "checkpoint"
	outputVersion = 1
)

// Outputs are the recorded directories of clients that checkpoints fill. The records are in the
// directory dir. Earlier versions named a record by its pod. The lock guards the other fields. It
// is held only while they are used.
type Outputs struct {
	dir    string
	mu     sync.Mutex
	byName map[string]outputRecord
	filled map[string]bool // names of the records whose checkpoints are in progress
}

// add adds the record of a checkpoint that begins. It returns the earlier records of the same
// directory. They are outdated, because the directory was empty. The error is FailedPrecondition if
// another checkpoint fills the directory.
func (o *Outputs) add(name string, r outputRecord) (outdated []string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for other, old := range o.byName {
		if old.Dev != r.Dev || old.Inode != r.Inode {
			continue
		}
		if o.filled[other] {
			return nil, errdefs.FailedPrecondition("another checkpoint is being written into %s", r.Path)
		}
		outdated = append(outdated, other)
	}
	for _, other := range outdated {
		delete(o.byName, other)
	}
	o.putLocked(name, r)
	o.filled[name] = true
	return outdated, nil
}

// put adds a record that an earlier daemon has left.
func (o *Outputs) put(name string, r outputRecord) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.putLocked(name, r)
}

func (o *Outputs) putLocked(name string, r outputRecord) {
	if o.byName == nil {
		o.byName, o.filled = map[string]outputRecord{}, map[string]bool{}
	}
	o.byName[name] = r
}

// Leave notes that a checkpoint has ended and its record stays.
func (o *Outputs) Leave(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.filled, name)
}

func (o *Outputs) remove(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.byName, name)
	delete(o.filled, name)
}

func (o *Outputs) all() map[string]outputRecord {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.byName)
}

func (o *Outputs) records() (*record.Dir, error) {
	return record.OpenDir(o.dir, outputKind, outputVersion, record.Process)
}

// Record records a directory before the first file is written. It returns the record's name.
func (o *Outputs) Record(dir *os.File) (name string, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return "", os.NewSyscallError("fstat", err)
	}
	records, err := o.records()
	if err != nil {
		return "", err
	}
	name = newName()
	r := outputRecord{dir.Name(), st.Dev, st.Ino}
	outdated, err := o.add(name, r)
	if err != nil {
		return "", err
	}
	for _, other := range outdated {
		err = errors.Join(err, records.Remove(other))
	}
	if err == nil {
		err = records.Write(name, r)
	}
	if err != nil {
		return "", errors.Join(err, o.Forget(name))
	}
	return name, nil
}

// Forget removes a record. After an error the record stays, for a directory that no checkpoint
// fills.
func (o *Outputs) Forget(name string) error {
	records, err := o.records()
	if err == nil {
		err = records.Remove(name)
	}
	if err != nil {
		o.Leave(name)
		return err
	}
	o.remove(name)
	return nil
}

// NewOutputs returns no outputs yet. dir is the directory of their records.
func NewOutputs(dir string) *Outputs { return &Outputs{dir: dir} }

// Load reads the records that an earlier daemon has left. It moves damaged ones away.
func (o *Outputs) Load() (damaged []record.Damaged, err error) {
	records, err := o.records()
	if err != nil {
		return nil, err
	}
	return records.Load(func(name string, _ int, body []byte) error {
		var r outputRecord
		if err := json.Unmarshal(body, &r); err != nil {
			return err
		}
		o.put(name, r)
		return nil
	})
}

// EmptyLeft empties the clients' directories of unfinished checkpoints.
func (o *Outputs) EmptyLeft() (err error) {
	for name, r := range o.all() {
		e := emptyOutput(r)
		if e == nil {
			e = o.Forget(name)
		}
		err = errors.Join(err, e)
	}
	return err
}

// emptyOutput empties a directory if it still is the recorded directory and its checkpoint is not
// complete. A complete checkpoint has a manifest. Its record may still exist after a power cut,
// because the removal of a record is not synced.
func emptyOutput(r outputRecord) error {
	fd, err := unix.Open(r.Path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", r.Path, os.NewSyscallError("open", err))
	}
	dir := os.NewFile(uintptr(fd), r.Path)
	defer dir.Close() // Close of a directory loses no changes
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Dev != r.Dev || st.Ino != r.Inode {
		return nil
	}
	err = unix.Fstatat(fd, archive.ManifestFile, &st, unix.AT_SYMLINK_NOFOLLOW)
	if !errors.Is(err, unix.ENOENT) {
		return os.NewSyscallError("fstatat", err)
	}
	return archive.Clear(dir)
}

// OpenEmpty opens an existing empty directory. A symbolic link at its place is refused.
func OpenEmpty(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errdefs.FailedPrecondition("open the output directory %s: %w", path, os.NewSyscallError("open", err))
	}
	dir := os.NewFile(uintptr(fd), path)
	if err := CheckEmpty(dir); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// CheckEmpty returns FailedPrecondition if a directory is not empty.
func CheckEmpty(dir *os.File) error {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err := dir.Readdirnames(1)
	switch {
	case err == nil:
		return errdefs.FailedPrecondition("the output directory %s is not empty", dir.Name())
	case errors.Is(err, io.EOF):
		_, err = dir.Seek(0, io.SeekStart)
	}
	return err
}
