package state

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/oci"
)

// CheckPodResources rejects resources of a pod that a container could not have.
func CheckPodResources(overhead, resources *runtimeapi.LinuxContainerResources, facts host.Facts) error {
	for _, r := range []*runtimeapi.LinuxContainerResources{overhead, resources} {
		if _, err := oci.LinuxResources(r, facts); err != nil {
			return err
		}
	}
	return nil
}

// CheckUserNamespace returns FailedPrecondition if a pod requests a user namespace and the host
// does not support them.
func CheckUserNamespace(config *runtimeapi.PodSandboxConfig, facts host.Facts) error {
	mappings, err := oci.UserNamespace(config)
	if err != nil || mappings == nil || facts.UserNamespaces {
		return err
	}
	return errdefs.FailedPrecondition("user namespaces are not supported on this host: %s", facts.NoUserNamespaces)
}
