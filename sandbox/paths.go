package sandbox

import "path/filepath"

// The places of things that exist for a pod or container. All derive from IDs.

// Below root:
func (m *Manager) podFiles(podID string) string    { return filepath.Join(m.cfg.Root, "sandboxes", podID) }
func (m *Manager) writableDir(ctrID string) string { return filepath.Join(m.cfg.Root, "rootfs", ctrID) }
func (m *Manager) trashDir() string                { return m.writableDir("trash") } // on the filesystem of what goes there
func (m *Manager) emptyLayer() string              { return filepath.Join(m.cfg.Root, "empty") }

// Below state:
func (m *Manager) shimDir(id string) string      { return filepath.Join(m.cfg.State, "c", id) }
func (m *Manager) libcontainerRoot() string      { return filepath.Join(m.cfg.State, "libcontainer") }
func (m *Manager) ociRoot(podID string) string   { return filepath.Join(m.cfg.State, "oci", podID) }
func (m *Manager) sharedMounts() string          { return filepath.Join(m.cfg.State, "pods") }
func (m *Manager) podMounts(podID string) string { return filepath.Join(m.sharedMounts(), podID) }
func (m *Manager) shmDir(podID string) string    { return filepath.Join(m.podMounts(podID), "shm") }

// netnsPrefix tells berth's network namespaces from others'.
const netnsPrefix = "berth-"

// Elsewhere:
func (m *Manager) netnsPath(podID string) string {
	return filepath.Join(m.cfg.NetNSDir, netnsPrefix+podID)
}
