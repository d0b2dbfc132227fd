package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"berth/checkpoint/archive"
	"berth/checkpoint/record"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/sandbox/state"
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

// outputs are the recorded directories by the record's name. Earlier versions named a record by its
// pod. The lock guards the fields and is held only to use them.
type outputs struct {
	mu     sync.Mutex
	byName map[string]outputRecord
	filled map[string]bool // names of the records whose checkpoints are in progress
}

// add adds the record of a checkpoint that begins. It returns the earlier records of the same
// directory. They are outdated: the directory was empty. The error is FailedPrecondition if another
// checkpoint fills the directory.
func (o *outputs) add(name string, r outputRecord) (outdated []string, err error) {
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
func (o *outputs) put(name string, r outputRecord) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.putLocked(name, r)
}

func (o *outputs) putLocked(name string, r outputRecord) {
	if o.byName == nil {
		o.byName, o.filled = map[string]outputRecord{}, map[string]bool{}
	}
	o.byName[name] = r
}

// leave notes that a checkpoint has ended and its record stays.
func (o *outputs) leave(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.filled, name)
}

func (o *outputs) remove(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.byName, name)
	delete(o.filled, name)
}

func (o *outputs) all() map[string]outputRecord {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.byName)
}

func (k *checkpoints) outputRecords() (*record.Dir, error) {
	return record.OpenDir(k.node.Checkpoints(), outputKind, outputVersion, record.Process)
}

// recordOutput records a directory before the first file is written. It returns the record's name.
func (k *checkpoints) recordOutput(dir *os.File) (name string, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return "", os.NewSyscallError("fstat", err)
	}
	records, err := k.outputRecords()
	if err != nil {
		return "", err
	}
	name = state.NewID()
	r := outputRecord{dir.Name(), st.Dev, st.Ino}
	outdated, err := k.outputs.add(name, r)
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
		return "", errors.Join(err, k.forgetOutput(name))
	}
	return name, nil
}

// forgetOutput removes a record. After an error it stays, for a directory that no checkpoint fills.
func (k *checkpoints) forgetOutput(name string) error {
	records, err := k.outputRecords()
	if err == nil {
		err = records.Remove(name)
	}
	if err != nil {
		k.outputs.leave(name)
		return err
	}
	k.outputs.remove(name)
	return nil
}

// undoLeft undoes the checkpoints of an earlier daemon before clients can use their
// directories again. After an error it retries in the background: a CRIU that hangs in the kernel
// must not keep the daemon from starting. Until it succeeds, new checkpoints are refused, so it
// undoes none of them.
func (k *checkpoints) undoLeft(ctx context.Context) error {
	if err := k.loadOutputs(); err != nil {
		return err
	}
	k.undoing.Store(true)
	err := k.undoCheckpoints(ctx)
	if err != nil {
		k.log.Error("undo the checkpoints of an earlier daemon; it is retried, and new checkpoints are refused until then",
			"error", err)
		k.unfinished.Later("undo", "checkpoints", k.undoCheckpoints)
	}
	return nil
}

func (k *checkpoints) loadOutputs() error {
	records, err := k.outputRecords()
	if err != nil {
		return err
	}
	damaged, err := records.Load(func(name string, _ int, body []byte) error {
		var r outputRecord
		if err := json.Unmarshal(body, &r); err != nil {
			return err
		}
		k.outputs.put(name, r)
		return nil
	})
	logDamaged(k.log, outputKind, damaged)
	return err
}

// undoCheckpoints ends the CRIUs of an earlier daemon and removes the files of its checkpoints.
func (k *checkpoints) undoCheckpoints(ctx context.Context) error {
	err := k.dumper.EndLeft(func(id string) string {
		if c, known := k.objects.containers.Get(id); known {
			return c.CgroupsPath
		}
		return ""
	})
	if err != nil {
		return err
	}
	err = errors.Join(k.removeLeftCheckpoints(ctx), k.emptyLeftOutputs())
	if err == nil {
		k.undoing.Store(false)
	}
	return err
}

// removeLeftCheckpoints removes the directories of unfinished checkpoints of containers.
func (k *checkpoints) removeLeftCheckpoints(ctx context.Context) error {
	entries, err := os.ReadDir(k.node.Checkpoints())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !state.IsID(e.Name()) {
			continue
		}
		failpoint.Reach("checkpoint.remove-left")
		err = errors.Join(err, safefs.RemoveAll(ctx, filepath.Join(k.node.Checkpoints(), e.Name())))
		failpoint.Reach("checkpoint.left-removed")
	}
	return err
}

// emptyLeftOutputs empties the clients' directories of unfinished checkpoints.
func (k *checkpoints) emptyLeftOutputs() (err error) {
	for name, r := range k.outputs.all() {
		e := emptyOutput(r)
		if e == nil {
			e = k.forgetOutput(name)
		}
		err = errors.Join(err, e)
	}
	return err
}

// emptyOutput empties a directory if it still is the recorded one and its checkpoint is not
// complete. A complete one has a manifest. A power cut can bring its record back, whose removal is
// not synced.
func emptyOutput(r outputRecord) error {
	fd, err := unix.Open(r.Path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", r.Path, os.NewSyscallError("open", err))
	}
	dir := os.NewFile(uintptr(fd), r.Path)
	defer dir.Close() // changes are not in its descriptor
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
