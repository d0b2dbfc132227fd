package podyaml

import (
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UserNamespaceIDs is how many users and groups a pod's user namespace has, as kubelet
// gives them: 0 to 65535, what images use (KEP-127).
const UserNamespaceIDs = 1 << 16

// WantsUserNamespace tells whether the manifest asks for a user namespace, for which a
// plan needs a FirstHostID.
func WantsUserNamespace(pod *corev1.Pod) bool {
	return pod.Spec.HostUsers != nil && !*pod.Spec.HostUsers
}

// idMappings is the one range of IDs of the host that the pod's stand for, nil for
// a pod without a user namespace.
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

// mapped shows a mount to the pod's user namespace with the owners that its files have
// on the host, as kubelet does with all volumes.
func (p *Plan) mapped(m *runtimeapi.Mount) *runtimeapi.Mount {
	m.UidMappings, m.GidMappings = p.idMappings(), p.idMappings()
	return m
}

// userNamespace refuses what Kubernetes refuses beside hostUsers: false.
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
