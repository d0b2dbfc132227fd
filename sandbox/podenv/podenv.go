package podenv

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"berth/image"
	"berth/internal/failpoint"
	"berth/internal/netns"
	"berth/internal/trace"
	"berth/internal/trash"
	"berth/sandbox/lsm"
	"berth/sandbox/state"
)

// Provisioner creates and removes the files, namespaces and mounts of pods.
type Provisioner struct {
	Dirs           state.Dirs
	HostResolvConf func() string // path of the resolv.conf of pods with the Default DNS policy
	Log            *slog.Logger
	Namespaces     Namespaces
	Networks       *Networks
	SELinux        lsm.SELinux
	Images         *image.Store
	Trash          *trash.Trash
}

// Make creates the pod's files and namespaces.
func (k Provisioner) Make(ctx context.Context, spec *state.PodSpec) error {
	if err := k.makeFiles(ctx, spec); err != nil {
		return err
	}
	defer trace.Begin(ctx, "namespaces").End()
	return k.Namespaces.Make(spec.ID, spec.Mappings, spec.NetNS)
}

func (k Provisioner) makeFiles(ctx context.Context, spec *state.PodSpec) error {
	defer trace.Begin(ctx, "files").End()
	return files{spec, k.Dirs, k.Log}.make(k.HostResolvConf)
}

// FinishFiles writes /etc/hosts with the pod's addresses and labels the pod's files, which all its
// containers read.
func (k Provisioner) FinishFiles(ctx context.Context, spec *state.PodSpec, ips []string) error {
	defer trace.Begin(ctx, "hosts").End()
	if err := (files{spec, k.Dirs, k.Log}).writeHosts(ips); err != nil {
		return err
	}
	if err := k.SELinux.LabelOwn(k.Dirs.Etc(spec.ID), spec.Labels); err != nil {
		return fmt.Errorf("pod %s: %w", spec.ID, err)
	}
	return nil
}

// RemoveNetNS removes a pinned network namespace. The path is empty for a pod on the host's
// network.
func (k Provisioner) RemoveNetNS(path string) error {
	if path == "" {
		return nil
	}
	return netns.Remove(path)
}

// RemoveMounts unmounts the pod's tmpfs and unpins its user namespace. Running containers keep
// both.
func (k Provisioner) RemoveMounts(podID string) error {
	if err := k.Namespaces.Unpin(podID); err != nil {
		return fmt.Errorf("pod %s: %w", podID, err)
	}
	return unmountTmpfs(k.Dirs, podID)
}

// Remove removes the rest of a stopped pod: the layers of its pause, its files and the cached
// results of its network.
func (k Provisioner) Remove(podID string) error {
	if err := k.Images.Release(podID); err != nil {
		return fmt.Errorf("release pause image of pod %s: %w", podID, err)
	}
	if err := k.Trash.Discard(k.Dirs.Writable(podID)); err != nil {
		return err
	}
	failpoint.Reach("pod.remove-files")
	if err := os.RemoveAll(k.Dirs.PodFiles(podID)); err != nil {
		return fmt.Errorf("remove files of pod %s: %w", podID, err)
	}
	failpoint.Reach("pod.files-removed")
	return k.Networks.Forget(podID)
}
