package reset

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"berth/cmd/berthd/daemon"
	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni/berthnet"
	"berth/internal/safefs"
	"berth/oci/confine"
	"berth/sandbox"
	"berth/sandbox/ownership"
	"berth/sandbox/state"
)

// remove removes everything that survey finds. It keeps the records until all pods are removed,
// because after a failure the next reset needs them to remove the remaining pods.
func remove(ctx context.Context, cfg *config.Config, grace time.Duration, log *slog.Logger) error {
	ids, err := state.IDs(cfg.Root)
	if err != nil {
		return err
	}
	unknown, err := ownership.Unknown(dirs(cfg))
	if err != nil {
		return err
	}
	for _, l := range unknown {
		if err := l.Kill(); err != nil {
			return err
		}
	}
	if len(ids)+len(unknown) > 0 {
		err := daemon.Offline(ctx, cfg, log, func(ctx context.Context, m *sandbox.Manager) error {
			return removePods(ctx, m, cfg, unknown, grace)
		})
		if err != nil {
			return fmt.Errorf("remove pods: %w", err)
		}
	}
	if err := berthnet.Uninstall(ctx, node.OwnNet(cfg).Key()); err != nil {
		return fmt.Errorf("remove the built-in network: %w", err)
	}
	if err := removeMounts(cfg); err != nil {
		return err
	}
	if err := removeProfile(); err != nil {
		return err
	}
	return removeDirs(ctx, cfg)
}

// atOnce limits the pods that are removed in parallel.
const atOnce = 8

// removePods stops all containers with a grace period, and removes the pods. If a pod cannot be
// removed, the other pods are still removed.
func removePods(ctx context.Context, m *sandbox.Manager, cfg *config.Config, unknown []ownership.Launch,
	grace time.Duration) error {
	containers := map[string][]string{}
	for _, c := range m.Containers() {
		containers[c.PodID] = append(containers[c.PodID], c.ID)
	}
	var group errgroup.Group
	group.SetLimit(atOnce)
	pods := m.Pods()
	failed := make([]error, len(pods))
	for i, p := range pods {
		group.Go(func() error {
			failed[i] = removePod(ctx, m, p.ID, containers[p.ID], grace)
			return nil
		})
	}
	_ = group.Wait() // the errors are in failed
	if err := errors.Join(failed...); err != nil {
		return err
	}
	return awaitRemoval(ctx, func() ([]string, error) { return left(m, cfg, unknown) })
}

func dirs(cfg *config.Config) state.Dirs {
	return state.Dirs{Root: cfg.Root, State: cfg.State, NetNSs: cfg.NetNSDir}
}

func removePod(ctx context.Context, m *sandbox.Manager, id string, containers []string, grace time.Duration) error {
	var group errgroup.Group
	for _, c := range containers {
		group.Go(func() error { return m.StopContainer(ctx, c, grace) })
	}
	// Removing the pod kills a container that could not be stopped, or fails as well.
	stopped := group.Wait()
	if err := m.RemovePodSandbox(ctx, id); err != nil {
		return fmt.Errorf("pod %.12s: %w", id, errors.Join(stopped, err))
	}
	return nil
}

// left returns the IDs of pods and containers that are not removed yet. They have a record, or
// files, or a network namespace.
func left(m *sandbox.Manager, cfg *config.Config, unknown []ownership.Launch) ([]string, error) {
	ids, err := state.IDs(cfg.Root)
	if err != nil {
		return nil, err
	}
	unrecorded, err := m.Unrecorded()
	for id := range unrecorded {
		ids = append(ids, id)
	}
	for _, l := range unknown {
		if _, err := os.Lstat(dirs(cfg).NetNS(l.ID)); err == nil {
			ids = append(ids, l.ID)
		}
	}
	return ids, err
}

// removalTimeout bounds the wait for unfinished work of an earlier daemon, which continues in the
// background.
const removalTimeout = 30 * time.Second

// awaitRemoval waits until no pod or container is left.
func awaitRemoval(ctx context.Context, left func() ([]string, error)) error {
	ctx, cancel := context.WithTimeout(ctx, removalTimeout)
	defer cancel()
	for {
		ids, err := left()
		if err != nil || len(ids) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the removal of %d pods and containers, one is %.12s: %w", len(ids), ids[0], ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// removeMounts removes the mounts, innermost first.
func removeMounts(cfg *config.Config) error {
	f := &found{}
	if err := f.readMounts(cfg); err != nil {
		return err
	}
	for _, point := range slices.Backward(f.mounts) {
		// The unmount is lazy, so that a process with an open file there does not prevent it.
		err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) { // gone with an outer mount
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	// Removing a directory with a mount would delete the content of a volume.
	left := &found{}
	if err := left.readMounts(cfg); err != nil {
		return err
	}
	if len(left.mounts) > 0 {
		return fmt.Errorf("%s is still a mount point", left.mounts[0])
	}
	return nil
}

// removeProfile unloads the AppArmor profile, unless a process of another berth uses it.
func removeProfile() error {
	f := &found{}
	if err := f.readProfile(nil); err != nil || !f.profile {
		return err
	}
	err := os.WriteFile("/sys/kernel/security/apparmor/.remove", []byte(confine.DefaultAppArmorProfile), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unload AppArmor profile %s: %w", confine.DefaultAppArmorProfile, err)
	}
	return nil
}

// removeDirs removes the directories. Mount points and targets of links stay, empty.
func removeDirs(ctx context.Context, cfg *config.Config) error {
	for _, path := range directories(cfg) {
		keep := stays(path)
		path = resolved(path)
		if !keep {
			if err := safefs.RemoveAll(ctx, path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove %s: %w", path, err)
			}
			continue
		}
		names, err := os.ReadDir(path)
		if errors.Is(err, fs.ErrNotExist) { // the link has no target
			continue
		}
		if err != nil {
			return fmt.Errorf("remove the content of %s: %w", path, err)
		}
		for _, n := range names {
			if err := safefs.RemoveAll(ctx, filepath.Join(path, n.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove %s: %w", filepath.Join(path, n.Name()), err)
			}
		}
	}
	return nil
}
