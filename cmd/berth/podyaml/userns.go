package podyaml

import (
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UserNamespaceIDs is the number of users and groups in a pod's user namespace, as in kubelet:
// images use 0 to 65535 (KEP-127).
const UserNamespaceIDs = 1 << 16

// WantsUserNamespace reports whether the manifest requests a user namespace. The plan then needs a
// FirstHostID.
func WantsUserNamespace(pod *corev1.Pod) bool {
	return pod.Spec.HostUsers != nil && !*pod.Spec.HostUsers
}

// idMappings returns the pod's range of host IDs, or nil without a user namespace.
func (p *Plan) idMappings() []*runtimeapi.IDMapping {
	if !WantsUserNamespace(p.Pod) {
		return nil
	}
	return []*runtimeapi.IDMapping{{HostId: p.FirstHostID, ContainerId: 0, Length: UserNamespaceIDs}}
}

func (p *Plan) usernsOptions() *runtimeapi.UserNamespace {
	ids := p.idMappings()
	if ids == nil {
		return nil
	}
	return &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: ids, Gids: ids}
}

// mapped adds the pod's ID mappings to a mount, as kubelet does with all volumes. Files then have
// the same owners in the pod's user namespace as on the host.
func (p *Plan) mapped(m *runtimeapi.Mount) *runtimeapi.Mount {
	m.UidMappings, m.GidMappings = p.idMappings(), p.idMappings()
	return m
}

// userNamespace refuses fields that Kubernetes refuses with hostUsers: false.
func (c *checker) userNamespace() {
	spec := &c.pod.Spec
	if !WantsUserNamespace(c.pod) {
		return
	}
	for _, other := range []struct {
		field string
		set   bool
	}{{"hostPID", spec.HostPID}, {"hostIPC", spec.HostIPC}} {
		if other.set {
			c.add("spec.hostUsers", "false: not possible with %s", other.field)
		}
	}
}
