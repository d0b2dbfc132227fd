package sandbox

import (
	"context"
	"time"

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

// gcLimit bounds the collection at start, which pods wait for.
const gcLimit = 10 * time.Second

// collectNetworks gives back what networks hold for pods that berth does not know:
// of records that were lost. It runs before the first request, so that every
// pod there can be is known. A plugin that can't do it keeps nobody from starting.
func (m *Manager) collectNetworks() error {
	var valid []cni.Pod
	for _, p := range m.pods.snapshot() {
		if p.rec.Network == nil {
			continue
		}
		pod, err := m.cniPod(p)
		if err != nil {
			return err
		}
		valid = append(valid, pod)
	}
	ctx, cancel := context.WithTimeout(m.ctx, gcLimit)
	defer cancel()
	if err := m.network.GC(ctx, valid); err != nil {
		m.log.Warn("collect what networks hold for pods that are gone", "error", err)
	}
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
