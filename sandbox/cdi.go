package sandbox

import runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

// cdiDevices are the names of the CDI devices that a container's config asks for, by the
// field that is made for it. Annotations steer nothing (CVE-2026-53492).
func cdiDevices(config *runtimeapi.ContainerConfig) []string {
	var names []string
	for _, d := range config.GetCDIDevices() {
		names = append(names, d.GetName())
	}
	return names
}
