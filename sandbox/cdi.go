package sandbox

import (
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/oci"
	"berth/sandbox/namespaces"
)

// cdiDevices are the names of the CDI devices that a container's config asks for, by the
// field that is made for it. Annotations steer nothing (CVE-2026-53492).
func cdiDevices(config *runtimeapi.ContainerConfig) []string {
	var names []string
	for _, d := range config.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	return names
}

// bindDevices makes the nodes of a complete spec bind mounts, if the pod has a user namespace. They are of
// the CRI's devices and of the CDI devices with these names.
func (m *Manager) bindDevices(p *pod, c *container, cdiNames []string, spec *specs.Spec) error {
	if !namespaces.HasUser(p.config) {
		return nil
	}
	sources, err := m.cfg.CDI.HostPaths(cdiNames)
	if err != nil {
		return err
	}
	for _, d := range c.config.GetDevices() {
		sources = append(sources, d.GetHostPath())
	}
	return oci.BindDevices(spec, sources, host.Files{})
}
