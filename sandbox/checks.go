package sandbox

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

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
	if err := request.CheckPodResources(config.GetLinux().GetOverhead(), config.GetLinux().GetResources(), *m.cfg.Host); err != nil {
		return err
	}
	return request.CheckUserNamespace(config, *m.cfg.Host)
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
