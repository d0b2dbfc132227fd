package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/userns"
	"berth/oci"
	"berth/shim/payload"
)

// A pod's user namespace is pinned beside its shm, under a name that follows from the
// pod's ID, so that who undoes the pod finds it. The pod's network namespace belongs to
// it; pause and containers join both by path.

// rootPlace is where launchers mount the root filesystem of a container in a user
// namespace, each in its own mount namespace. libcontainer looks for it there as the
// namespace's root, who may not pass through the state directory; so it is beside
// that, and nothing is ever in it.
func (m *Manager) rootPlace() string { return m.cfg.State + "-rootfs" }

func (m *Manager) usernsPath(podID string) string { return filepath.Join(m.podMounts(podID), "userns") }

// prepareRootPlace makes rootPlace, on a mount of its own: what a launcher mounts must not
// come to the host. It must be there before the first launcher gets its mount namespace.
func (m *Manager) prepareRootPlace() error {
	if err := os.MkdirAll(m.rootPlace(), 0o711); err != nil {
		return fmt.Errorf("make place of root filesystems: %w", err)
	}
	return bindOnItself(m.rootPlace(), unix.MS_PRIVATE)
}

// holder is a program that does nothing.
func (m *Manager) holder() string { return m.payload.Pause + payload.PauseProgram }

// makeNamespaces makes the user and network namespaces that the pod does not share with
// the node, and pins them.
func (m *Manager) makeNamespaces(p *pod) error {
	mappings, err := oci.UserNamespace(p.config)
	if err != nil {
		return err
	}
	if mappings == nil {
		if p.rec.NetNS == "" {
			return nil
		}
		return cni.NewNetNS(p.rec.NetNS)
	}
	return userns.With(m.holder(), *mappings, p.rec.NetNS != "", func(ns userns.Namespaces) error {
		if err := userns.Pin(ns.User(), m.usernsPath(p.id)); err != nil {
			return err
		}
		if p.rec.NetNS == "" {
			return nil
		}
		return cni.PinNetNS(ns.Net(), p.rec.NetNS)
	})
}

// rootIDMap is how the root filesystems of a pod's containers are shown to its user
// namespace, nil if it has none.
func (m *Manager) rootIDMap(p *pod) (*rootfs.IDMap, error) {
	mappings, err := oci.UserNamespace(p.config)
	if err != nil || mappings == nil {
		return nil, err
	}
	return &rootfs.IDMap{UserNS: m.usernsPath(p.id), Mappings: *mappings}, nil
}

// rootPlaceOf is where a root filesystem has to be mounted; "" if that does not matter.
func (m *Manager) rootPlaceOf(root rootfs.Spec) string {
	if root.IDMap == nil {
		return ""
	}
	return m.rootPlace()
}

// checkUserNamespace refuses a pod with a user namespace where there can't be one.
func (m *Manager) checkUserNamespace(config *runtimeapi.PodSandboxConfig) error {
	mappings, err := oci.UserNamespace(config)
	if err != nil || mappings == nil || m.cfg.Host.UserNamespaces {
		return err
	}
	return errdefs.FailedPrecondition("user namespaces are not supported on this host: %s", m.cfg.Host.NoUserNamespaces)
}

// checkIDMappedMounts refuses mounts whose filesystem cannot be mapped, when the
// container is created and not only when it starts.
func (m *Manager) checkIDMappedMounts(p *pod, spec *specs.Spec) error {
	ns := m.usernsPath(p.id)
	for _, mount := range spec.Mounts {
		if r := p.rec.Runtime; oci.IsIDMapped(mount) && r != nil && !r.IDMappedMounts { // it would show wrong owners
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

// probeUserNamespaces finds out whether pods can have user namespaces, by doing all
// that they need of the kernel, and writes it down in the facts of the host.
func (m *Manager) probeUserNamespaces() error {
	err := m.tryUserNamespace()
	m.cfg.Host.UserNamespaces = err == nil
	if err != nil {
		m.cfg.Host.NoUserNamespaces = err.Error()
		m.log.Warn("pods can't have user namespaces", "error", err)
	}
	return nil
}

func (m *Manager) tryUserNamespace() error {
	if err := userns.CheckPassable(m.rootPlace()); err != nil {
		return err
	}
	return rootfs.ProbeUserNamespace(m.holder(), m.trashDir())
}

func (m *Manager) hasUserNamespace(p *pod) bool {
	mappings, err := oci.UserNamespace(p.config)
	return err == nil && mappings != nil
}
