package sandbox

import (
	"path/filepath"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/dnsfiles"
)

// checkPodConfig refuses what no later step would refuse as precisely.
func (m *Manager) checkPodConfig(config *runtimeapi.PodSandboxConfig, handler string) error {
	md := config.GetMetadata()
	if md == nil {
		return errdefs.InvalidArgument("the pod config has no metadata")
	}
	for _, part := range []struct{ what, name string }{
		{"pod name", md.Name}, {"pod namespace", md.Namespace}, {"pod uid", md.Uid},
	} {
		if part.name == "" && part.what != "pod name" {
			continue // static pods of tests and crictl have none; they are no less a pod
		}
		if err := checkName(part.what, part.name); err != nil {
			return err
		}
	}
	if _, err := m.handlers.Find(handler); err != nil {
		return err
	}
	if dir := config.GetLogDirectory(); dir != "" && !filepath.IsAbs(dir) {
		return errdefs.InvalidArgument("log_directory %q is not an absolute path", dir)
	}
	if name := config.GetHostname(); name != "" {
		if err := dnsfiles.CheckHostname(name); err != nil {
			return err
		}
	}
	return m.checkUserNamespace(config)
}
