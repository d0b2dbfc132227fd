package oci

import (
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// pauseNamespace returns the path of the pause's namespace of a kind. If there is no pause, it
// returns "".
func (p Pod) pauseNamespace(kind string) string {
	if p.PausePID == 0 {
		return ""
	}
	return fmt.Sprintf("/proc/%d/ns/%s", p.PausePID, kind)
}

// setNamespaces joins the pod's network, IPC and UTS namespaces, unless the pod uses the node's. If
// the spec does not list a namespace, the container uses the node's, so a missing path must be an
// error.
func setNamespaces(in ContainerInput, spec *specs.Spec) error {
	if err := refuseEscape(in); err != nil {
		return err
	}
	if err := checkCgroupView(in); err != nil {
		return err
	}
	if err := setFirstNamespaces(in.Pod, spec); err != nil {
		return err
	}
	join := func(t specs.LinuxNamespaceType, path string) error {
		if path == "" {
			return errdefs.Internal("pod %s: path of its %s namespace is missing", in.Pod.ID, t)
		}
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: t, Path: path})
		return nil
	}
	if !in.Pod.hostNetwork() {
		if err := join(specs.NetworkNamespace, in.Pod.NetNS); err != nil {
			return err
		}
		if err := join(specs.UTSNamespace, in.Pod.pauseNamespace("uts")); err != nil {
			return err
		}
	}
	if !in.Pod.hostIPC() {
		if err := join(specs.IPCNamespace, in.Pod.pauseNamespace("ipc")); err != nil {
			return err
		}
	}
	if err := setPIDNamespace(in, spec, join); err != nil {
		return err
	}
	if in.ownCgroupNamespace() {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return nil
}

// refuseEscape refuses a container that requests a namespace of the node that its pod does not use.
func refuseEscape(in ContainerInput) error {
	o := in.security().GetNamespaceOptions()
	for _, ns := range []struct {
		name    string
		mode    runtimeapi.NamespaceMode
		podHost bool
	}{
		{"network", o.GetNetwork(), in.Pod.hostNetwork()},
		{"ipc", o.GetIpc(), in.Pod.hostIPC()},
		{"pid", o.GetPid(), in.Pod.hostPID()},
	} {
		if ns.mode == runtimeapi.NamespaceMode_NODE && !ns.podHost {
			return errdefs.InvalidArgument("namespace_options.%s: NODE, but pod %s is not on the node's", ns.name, in.Pod.ID)
		}
	}
	return nil
}

func setPIDNamespace(in ContainerInput, spec *specs.Spec, join func(specs.LinuxNamespaceType, string) error) error {
	o := in.security().GetNamespaceOptions()
	switch o.GetPid() {
	case runtimeapi.NamespaceMode_CONTAINER:
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.PIDNamespace})
		return nil
	case runtimeapi.NamespaceMode_TARGET:
		if in.TargetPIDNS == "" {
			return errdefs.InvalidArgument("namespace_options.pid: TARGET, but container %q does not exist",
				o.GetTargetId())
		}
		return join(specs.PIDNamespace, in.TargetPIDNS)
	case runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE:
		if in.Pod.hostPID() {
			return nil
		}
		return join(specs.PIDNamespace, in.Pod.pauseNamespace("pid"))
	}
	return errdefs.InvalidArgument("namespace_options.pid: unknown mode %d", o.GetPid())
}
