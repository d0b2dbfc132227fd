package podenv

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"berth/internal/failpoint"
	"berth/internal/netns"
	"berth/sandbox/state"
)

// Unrecorded returns the IDs of pods and containers that have something on the host and are not known: their records
// were damaged and set aside.
func (k Provisioner) Unrecorded(known func(id string) bool) (map[string]bool, error) {
	ids := map[string]bool{}
	for _, dir := range []string{k.Dirs.Shim(""), k.Dirs.Libcontainer(), k.Dirs.OCI(""), k.Dirs.SharedMounts(), k.Dirs.PodFiles(""), k.Dirs.Writable("")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("look for what has no record: %w", err)
		}
		for _, e := range entries {
			if state.IsID(e.Name()) && !known(e.Name()) {
				ids[e.Name()] = true
			}
		}
	}
	return ids, nil
}

// RemoveUnrecorded removes everything that a pod or container of that ID can have, its processes apart. The caller has removed those.
// Networks were asked to collect theirs before.
func (k Provisioner) RemoveUnrecorded(ctx context.Context, id string) error {
	err := errors.Join(
		k.RemoveMounts(id),
		k.Trash.Discard(k.Dirs.Writable(id)))
	// The network comes last, for it may have to wait until the node has one. What says that it is due is the pod's files.
	if detachErr := k.detachUnrecorded(ctx, id); detachErr != nil {
		return errors.Join(err, detachErr)
	}
	failpoint.Reach("unrecorded.detached")
	if err := errors.Join(err, netns.Remove(k.Dirs.NetNS(id))); err != nil {
		return err
	}
	failpoint.Reach("unrecorded.remove-files")
	err = os.RemoveAll(k.Dirs.PodFiles(id))
	failpoint.Reach("unrecorded.files-removed")
	return err
}

// detachUnrecorded gives the addresses back of what was a pod: it has files, which are made before the
// network is asked, and removed after it. The configuration its ADD used is lost with the record; what libcni recorded
// of that was used before, by Networks.Collect. Both may be lost in a power cut, so the present one is tried.
func (k Provisioner) detachUnrecorded(ctx context.Context, id string) error {
	if _, err := os.Lstat(k.Dirs.PodFiles(id)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return k.Networks.DetachOrphan(ctx, id, k.Dirs.NetNS(id))
}
