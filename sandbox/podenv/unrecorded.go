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

// Unrecorded returns the IDs of unknown pods and containers with files on the host. Their records
// were damaged and moved away.
func (k Provisioner) Unrecorded(known func(id string) bool) (map[string]bool, error) {
	ids := map[string]bool{}
	for _, dir := range []string{k.Dirs.Shim(""), k.Dirs.Libcontainer(), k.Dirs.OCI(""), k.Dirs.SharedMounts(),
		k.Dirs.PodFiles(""), k.Dirs.Writable("")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("find pods and containers without a record: %w", err)
		}
		for _, e := range entries {
			if state.IsID(e.Name()) && !known(e.Name()) {
				ids[e.Name()] = true
			}
		}
	}
	return ids, nil
}

// RemoveUnrecorded removes everything that a pod or container with this ID can own, except its
// processes. The caller has removed the processes, and has called Networks.Collect.
func (k Provisioner) RemoveUnrecorded(ctx context.Context, id string) error {
	err := errors.Join(
		k.RemoveMounts(id),
		k.Trash.Discard(k.Dirs.Writable(id)))
	// The network comes last, because it may have to wait for a CNI configuration. The pod's files
	// stay until then, because they show that a DEL is due.
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

// detachUnrecorded releases the addresses of a pod. Only pods have network namespaces and files
// below root. These files exist from before ADD until after DEL. The configuration of ADD was lost
// with the record. Networks.Collect has already used libcni's cached copy. A power cut can also
// lose the copy, so DEL runs with the present configuration.
func (k Provisioner) detachUnrecorded(ctx context.Context, id string) error {
	_, err := os.Lstat(k.Dirs.PodFiles(id))
	if errors.Is(err, fs.ErrNotExist) && netns.Existing(k.Dirs.NetNS(id)) == "" {
		return nil
	}
	return k.Networks.DetachOrphan(ctx, id, k.Dirs.NetNS(id))
}
