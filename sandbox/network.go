package sandbox

import (
	"berth/cni"
)

// runtimeRecord is what UpdateRuntimeConfig told.
type runtimeRecord struct {
	PodCIDR string `json:"podCIDR"`
}

const runtimeVersion = 1

// UpdatePodCIDR takes the node's pod CIDR, one or several comma-separated, as
// kubelet passes it on from the control plane. Networks that declare the ipRanges
// capability get it with every new pod. Empty: none. InvalidArgument otherwise.
func (m *Manager) UpdatePodCIDR(cidr string) error {
	if err := m.setPodCIDR(cidr); err != nil {
		return err
	}
	return m.runtimeRecs.Write("runtime", runtimeRecord{PodCIDR: cidr})
}

func (m *Manager) setPodCIDR(cidr string) error {
	ranges, err := cni.ParsePodCIDRs(cidr)
	if err != nil {
		return err
	}
	m.ipRanges.Store(&ranges)
	return nil
}

// cniPod is the pod as plugins see it: the same for ADD and DEL.
func (m *Manager) cniPod(p *pod) (cni.Pod, error) {
	pod, err := cni.NewPod(p.id, p.rec.NetNS, p.config)
	if err != nil {
		return pod, err
	}
	pod.IPRanges = p.rec.IPRanges
	return pod, nil
}
