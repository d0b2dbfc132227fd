package sandbox

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/oci"
	"berth/sandbox/request"
)

// checkPodConfig refuses what no later step would refuse as precisely.
func (m *Manager) checkPodConfig(config *runtimeapi.PodSandboxConfig, handler string) error {
	if err := request.CheckPod(config); err != nil {
		return err
	}
	if _, err := m.handlers.Find(handler); err != nil {
		return err
	}
	if err := checkPodResources(config.GetLinux().GetOverhead(), config.GetLinux().GetResources(), *m.cfg.Host); err != nil {
		return err
	}
	return m.checkUserNamespace(config)
}

// checkPodResources refuses resources of a pod that no container could have, either.
func checkPodResources(overhead, resources *runtimeapi.LinuxContainerResources, facts host.Facts) error {
	for _, r := range []*runtimeapi.LinuxContainerResources{overhead, resources} {
		if _, err := oci.LinuxResources(r, facts); err != nil {
			return err
		}
	}
	return nil
}

// checkUserNamespace refuses a pod with a user namespace where there can't be one.
func (m *Manager) checkUserNamespace(config *runtimeapi.PodSandboxConfig) error {
	mappings, err := oci.UserNamespace(config)
	if err != nil || mappings == nil || m.cfg.Host.UserNamespaces {
		return err
	}
	return errdefs.FailedPrecondition("user namespaces are not supported on this host: %s", m.cfg.Host.NoUserNamespaces)
}

// probeUserNamespaces finds out whether pods can have user namespaces, by doing all
// that they need of the kernel, and writes it down in the facts of the host.
func (m *Manager) probeUserNamespaces() error {
	err := m.namespaces.Probe()
	m.cfg.Host.UserNamespaces = err == nil
	if err != nil {
		m.cfg.Host.NoUserNamespaces = err.Error()
		m.log.Warn("pods can't have user namespaces", "error", err)
	}
	return nil
}
