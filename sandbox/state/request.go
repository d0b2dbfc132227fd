package state

import (
	"fmt"
	"path/filepath"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/oci"
)

// CheckPod rejects the invalid config of a pod.
func CheckPod(config *runtimeapi.PodSandboxConfig) error {
	md := config.GetMetadata()
	if md == nil {
		return errdefs.InvalidArgument("the pod config has no metadata")
	}
	for _, part := range []struct{ what, name string }{
		{"pod name", md.Name}, {"pod namespace", md.Namespace}, {"pod uid", md.Uid},
	} {
		if part.name == "" && part.what != "pod name" {
			continue // crictl and static pods of tests have no namespace and no uid
		}
		if err := checkName(part.what, part.name); err != nil {
			return err
		}
	}
	if dir := config.GetLogDirectory(); dir != "" && !filepath.IsAbs(dir) {
		return errdefs.InvalidArgument("log_directory %q is not an absolute path", dir)
	}
	if name := config.GetHostname(); name != "" {
		if err := oci.CheckHostname(name); err != nil {
			return err
		}
	}
	return nil
}

// CheckContainer rejects the invalid config of a container in that pod. current is the pod's config
// in the request, nil if there is none. It may permit a privileged container that the pod's
// creation did not: an ephemeral container is added later.
func CheckContainer(config *runtimeapi.ContainerConfig, pod, current *runtimeapi.PodSandboxConfig) error {
	md := config.GetMetadata()
	if md == nil {
		return errdefs.InvalidArgument("the container config has no metadata")
	}
	if err := checkName("container name", md.Name); err != nil {
		return err
	}
	if config.GetLinux().GetSecurityContext().GetPrivileged() && !isPrivileged(pod) && !isPrivileged(current) {
		return errdefs.InvalidArgument("privileged container in a pod that is not privileged")
	}
	logPath := config.GetLogPath()
	if logPath == "" {
		return nil
	}
	if pod.GetLogDirectory() == "" {
		return nil // crictl sets a log path but no directory; like other runtimes, berth then keeps no log
	}
	if !filepath.IsLocal(logPath) {
		return errdefs.InvalidArgument("log path %q leaves the pod's log directory", logPath)
	}
	return nil
}

func isPrivileged(pod *runtimeapi.PodSandboxConfig) bool {
	return pod.GetLinux().GetSecurityContext().GetPrivileged()
}

// checkName rejects names that could be mistaken for paths or break a log line.
func checkName(what, name string) error {
	if name == "" {
		return errdefs.InvalidArgument("the %s is empty", what)
	}
	bad := func(r rune) bool { return r == '/' || r < ' ' || r == 0x7f }
	if len(name) > 253 || name == "." || name == ".." || strings.ContainsFunc(name, bad) {
		return errdefs.InvalidArgument("the %s %.300q is not a name: at most 253 bytes, no slash, no control character",
			what, name)
	}
	return nil
}

// PodIdentity returns the identity of a pod. Requests with the same identity mean the same pod.
// Names are quoted, so that different pods cannot have the same identity.
func PodIdentity(md *runtimeapi.PodSandboxMetadata) string {
	return fmt.Sprintf("pod %q in namespace %q (uid %q, attempt %d)",
		md.GetName(), md.GetNamespace(), md.GetUid(), md.GetAttempt())
}

// ContainerIdentity returns the identity of a container. Requests with the same identity mean the
// same container.
func ContainerIdentity(podID string, md *runtimeapi.ContainerMetadata) string {
	return fmt.Sprintf("container %q (attempt %d) of pod %s", md.GetName(), md.GetAttempt(), podID)
}

// HostNetwork reports whether a pod uses the node's network.
func HostNetwork(config *runtimeapi.PodSandboxConfig) bool {
	return config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == runtimeapi.NamespaceMode_NODE
}

// HostIPC reports whether a pod uses the node's IPC namespace.
func HostIPC(config *runtimeapi.PodSandboxConfig) bool {
	return config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetIpc() == runtimeapi.NamespaceMode_NODE
}
