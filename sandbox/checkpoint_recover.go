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

	"berth/checkpoint"
	"berth/checkpoint/archive"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/sandbox/state"
)

// outputRecord says which directory of a client a checkpoint of a pod fills. A daemon that dies
// meanwhile leaves it to the next one, which empties the directory.
type outputRecord struct {
	Path  string `json:"path"`
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
}

const (
	outputKind    = "checkpoint"
	outputVersion = 1
)

// outputs are the recorded directories by pod. The lock guards the map and is held only to use it.
type outputs struct {
	mu    sync.Mutex
	byPod map[string]outputRecord
}

// put adds a record and returns the other pods' records of the same directory. They are outdated: the
// directory was empty.
func (o *outputs) put(podID string, r outputRecord) (outdated []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for other, old := range o.byPod {
		if old.Dev == r.Dev && old.Inode == r.Inode && other != podID {
			outdated = append(outdated, other)
			delete(o.byPod, other)
		}
	}
	if o.byPod == nil {
		o.byPod = map[string]outputRecord{}
	}
	o.byPod[podID] = r
	return outdated
}

func (o *outputs) remove(podID string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.byPod, podID)
}

func (o *outputs) all() map[string]outputRecord {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.byPod)
}

func (m *Manager) outputRecords() (*checkpoint.Dir, error) {
	return checkpoint.OpenDir(m.dirs.Checkpoints(), outputKind, outputVersion, checkpoint.Process)
}

// recordOutput records a directory before the first file is written.
func (m *Manager) recordOutput(podID string, dir *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	records, err := m.outputRecords()
	if err != nil {
		return err
	}
	r := outputRecord{dir.Name(), st.Dev, st.Ino}
	for _, other := range m.outputs.put(podID, r) {
		if err := records.Remove(other); err != nil {
			return err
		}
	}
	return records.Write(podID, r)
}

func (m *Manager) forgetOutput(podID string) error {
	records, err := m.outputRecords()
	if err != nil {
		return err
	}
	if err := records.Remove(podID); err != nil {
		return err
	}
	m.outputs.remove(podID)
	return nil
}

// recoverCheckpoints undoes the checkpoints of an earlier daemon before clients can use their directories
// again. After an error it retries in the background: a CRIU that hangs in the kernel must not keep the
// daemon from starting. Until it succeeds, new checkpoints are refused, so it undoes none of them.
func (m *Manager) recoverCheckpoints(ctx context.Context) error {
	if err := m.loadOutputs(); err != nil {
		return err
	}
	m.undoing.Store(true)
	err := m.undoCheckpoints(ctx)
	if err != nil {
		m.log.Error("undo the checkpoints of an earlier daemon; it is retried, and new checkpoints are refused until then",
			"error", err)
		m.unfinished.Later("undo", "checkpoints", m.undoCheckpoints)
	}
	return nil
}

func (m *Manager) loadOutputs() error {
	records, err := m.outputRecords()
	if err != nil {
		return err
	}
	damaged, err := records.Load(func(podID string, _ int, body []byte) error {
		var r outputRecord
		if err := json.Unmarshal(body, &r); err != nil {
			return err
		}
		m.outputs.put(podID, r)
		return nil
	})
	m.logDamaged(outputKind, damaged)
	return err
}

// undoCheckpoints ends the CRIUs of an earlier daemon and removes the files of its checkpoints.
func (m *Manager) undoCheckpoints(ctx context.Context) error {
	err := m.dumper.EndLeft(func(id string) string {
		if c, known := m.containers.Get(id); known {
			return c.CgroupsPath
		}
		return ""
	})
	if err != nil {
		return err
	}
	err = errors.Join(m.removeLeftCheckpoints(ctx), m.emptyLeftOutputs())
	if err == nil {
		m.undoing.Store(false)
	}
	return err
}

// removeLeftCheckpoints removes the directories of unfinished checkpoints of containers.
func (m *Manager) removeLeftCheckpoints(ctx context.Context) error {
	entries, err := os.ReadDir(m.dirs.Checkpoints())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !state.IsID(e.Name()) {
			continue
		}
		failpoint.Reach("checkpoint.remove-left")
		err = errors.Join(err, safefs.RemoveAll(ctx, filepath.Join(m.dirs.Checkpoints(), e.Name())))
		failpoint.Reach("checkpoint.left-removed")
	}
	return err
}

// emptyLeftOutputs empties the clients' directories of unfinished checkpoints.
func (m *Manager) emptyLeftOutputs() (err error) {
	for podID, r := range m.outputs.all() {
		e := emptyOutput(r)
		if e == nil {
			e = m.forgetOutput(podID)
		}
		err = errors.Join(err, e)
	}
	return err
}

// emptyOutput empties a directory if it still is the recorded one.
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
	return archive.Clear(dir)
}
