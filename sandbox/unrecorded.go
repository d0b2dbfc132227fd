package sandbox

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"berth/cni"
	"berth/internal/failpoint"
)

// removeUnrecorded removes what bears the ID of a pod or container that has no
// record: its record was damaged and set aside. Networks were asked to collect theirs before.
func (m *Manager) removeUnrecorded() error {
	ids := map[string]bool{}
	for _, dir := range []string{m.dirs.Shim(""), m.dirs.Libcontainer(), m.dirs.OCI(""), m.dirs.SharedMounts(), m.dirs.PodFiles(""), m.dirs.Writable("")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("look for what has no record: %w", err)
		}
		for _, e := range entries {
			if isID(e.Name()) && !m.hasRecord(e.Name()) {
				ids[e.Name()] = true
			}
		}
	}
	for id := range ids {
		m.log.Warn("removing what a pod or container without record left", "id", id)
		m.later("remove what is left of", id, func(ctx context.Context) error { return m.removeByID(ctx, id) })
	}
	return nil
}

// isID tells whether a folder's name is one of newID's; others are not ours.
func isID(name string) bool {
	b, err := hex.DecodeString(name)
	return err == nil && len(b) == 32
}

func (m *Manager) hasRecord(id string) bool {
	_, pod := m.pods.Get(id)
	_, ctr := m.containers.Get(id)
	return pod || ctr
}

// removeByID removes everything that an object of that ID can have.
func (m *Manager) removeByID(ctx context.Context, id string) error {
	failpoint.Reach("unrecorded.remove")
	if err := m.processes.RemoveByID(ctx, id); err != nil {
		return err // it may be alive: it keeps its files
	}
	failpoint.Reach("unrecorded.processes-removed")
	if err := m.detachUnrecorded(ctx, id); err != nil {
		return err
	}
	failpoint.Reach("unrecorded.detached")
	return errors.Join(
		m.processes.RemoveRoot(id),
		cni.RemoveNetNS(m.dirs.NetNS(id)),
		m.removePodMounts(id),
		os.RemoveAll(m.dirs.PodFiles(id)),
		m.trash.Discard(m.dirs.Writable(id)))
}

// detachUnrecorded gives the addresses back of what was a pod: it has files, which are made before the
// network is asked, and removed after it. The configuration its ADD used is lost with the record; what libcni recorded
// of that was used before, by Networks.Collect. Both may be lost in a power cut, so the present one is tried.
func (m *Manager) detachUnrecorded(ctx context.Context, id string) error {
	if _, err := os.Lstat(m.dirs.PodFiles(id)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return m.networks.DetachUnrecorded(ctx, id, m.dirs.NetNS(id))
}
