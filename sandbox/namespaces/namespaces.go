// Package namespaces makes the user and network namespaces of pods.
//
// # Contract
//
// A pod's user namespace is pinned beside its shm, under a name that follows from the
// pod's ID, so that who undoes the pod finds it. The pod's network namespace belongs to
// it; pause and containers join both by path. What can't work in a user namespace is refused
// before a container exists, with FailedPrecondition.
package namespaces

import (
	"errors"
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/netns"
	"berth/internal/rootfs"
	"berth/internal/userns"
	"berth/oci"
	"berth/sandbox/handler"
	"berth/sandbox/state"
)

// Kit is what is needed to make them.
type Kit struct {
	Dirs   state.Dirs
	Holder string // a program that does nothing
}

// Make makes the user and network namespaces that the pod does not share with the node, and pins
// them, that of the network at netnsPath; empty: it has the node's.
func (k Kit) Make(podID string, config *runtimeapi.PodSandboxConfig, netnsPath string) error {
	mappings, err := oci.UserNamespace(config)
	if err != nil {
		return err
	}
	if mappings == nil {
		if netnsPath == "" {
			return nil
		}
		return netns.New(netnsPath)
	}
	return userns.With(k.Holder, *mappings, netnsPath != "", func(ns userns.Namespaces) error {
		if err := userns.Pin(ns.User(), k.Dirs.UserNS(podID)); err != nil {
			return err
		}
		if netnsPath == "" {
			return nil
		}
		return netns.Pin(ns.Net(), netnsPath)
	})
}

// IDMap is how the root filesystems of a pod's containers are shown to its user
// namespace, nil if it has none.
func (k Kit) IDMap(podID string, config *runtimeapi.PodSandboxConfig) (*rootfs.IDMap, error) {
	mappings, err := oci.UserNamespace(config)
	if err != nil || mappings == nil {
		return nil, err
	}
	return &rootfs.IDMap{UserNS: k.Dirs.UserNS(podID), Mappings: *mappings}, nil
}

// RootPlace is where a root filesystem has to be mounted; "" if that does not matter.
func (k Kit) RootPlace(root rootfs.Spec) string {
	if root.IDMap == nil {
		return ""
	}
	return k.Dirs.RootPlace()
}

// CheckMounts refuses mounts whose filesystem cannot be mapped, when the
// container is created and not only when it starts.
func (k Kit) CheckMounts(podID string, r *handler.Runtime, spec *specs.Spec) error {
	ns := k.Dirs.UserNS(podID)
	for _, mount := range spec.Mounts {
		if oci.IsIDMapped(mount) && r != nil && !r.IDMappedMounts { // it would show wrong owners
			return errdefs.FailedPrecondition("mount of %s: %s has no ID-mapped mounts, or does not say so", mount.Destination, r.Path)
		}
		if !oci.IsIDMapped(mount) || len(mount.UIDMappings) > 0 { // those libcontainer makes a namespace for
			continue
		}
		err := rootfs.CheckIDMap(mount.Source, ns)
		if errors.Is(err, errors.ErrUnsupported) {
			return errdefs.FailedPrecondition("mount of %s: %w", mount.Destination, err)
		}
		if err != nil {
			return fmt.Errorf("mount of %s: %w", mount.Destination, err)
		}
	}
	return nil
}

// Probe finds out whether pods can have user namespaces, by doing all that they need of the kernel. The error
// tells why not.
func (k Kit) Probe() error {
	if err := userns.CheckPassable(k.Dirs.RootPlace()); err != nil {
		return err
	}
	return rootfs.ProbeUserNamespace(k.Holder, k.Dirs.Trash())
}

// Unpin takes away the pin of a pod's user namespace. It may be repeated.
func (k Kit) Unpin(podID string) error { return userns.Unpin(k.Dirs.UserNS(podID)) }

// HasUser tells whether a pod is to have a user namespace.
func HasUser(config *runtimeapi.PodSandboxConfig) bool {
	mappings, err := oci.UserNamespace(config)
	return err == nil && mappings != nil
}
