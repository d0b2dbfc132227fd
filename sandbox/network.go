package sandbox

import (
	"context"
	"encoding/json"
	"time"

	"berth/cni"
	"berth/sandbox/record"
)

// UpdatePodCIDR takes the node's pod CIDR, one or several comma-separated, as
// kubelet passes it on from the control plane. Networks that declare the ipRanges
// capability get it with every new pod. Empty: none. InvalidArgument otherwise.
func (m *Manager) UpdatePodCIDR(ctx context.Context, cidr string) error {
	ranges, err := cni.ParsePodCIDRs(cidr)
	if err != nil {
		return err
	}
	return m.tasks.WithTurn(ctx, m.runtimeTurn, "update", "runtime config", func() error {
		if err := m.runtimeRecs.Write("runtime", record.Runtime{PodCIDR: cidr}); err != nil {
			return err
		}
		m.ipRanges.Store(&ranges)
		return nil
	})
}

// loadPodCIDR reads the pod CIDR that kubelet told an earlier daemon.
func (m *Manager) loadPodCIDR() error {
	m.ipRanges.Store(new([][]cni.IPRange))
	damaged, err := m.runtimeRecs.Load(func(_ string, _ int, body []byte) error {
		var rec record.Runtime
		if err := json.Unmarshal(body, &rec); err != nil {
			return err
		}
		ranges, err := cni.ParsePodCIDRs(rec.PodCIDR)
		if err != nil {
			return err
		}
		m.ipRanges.Store(&ranges)
		return nil
	})
	m.logDamaged("runtime", damaged)
	return err
}

// gcLimit bounds the collection at start, which pods wait for.
const gcLimit = 10 * time.Second

// collectNetworks gives back what networks hold for pods that berth does not know:
// of records that were lost. It runs before the first request, so that every
// pod there can be is known. A plugin that can't do it keeps nobody from starting.
func (m *Manager) collectNetworks(ctx context.Context) error {
	var valid []cni.Pod
	for _, p := range m.pods.Snapshot() {
		if p.rec.Network == nil {
			continue
		}
		pod, err := m.cniPod(p)
		if err != nil {
			m.log.Warn("a pod can't be told to CNI plugins: what they hold for it is given back", "pod", p.id, "error", err)
			continue
		}
		valid = append(valid, pod)
	}
	ctx, cancel := context.WithTimeout(ctx, gcLimit)
	defer cancel()
	if err := m.network.GC(ctx, valid); err != nil {
		m.log.Warn("collect what networks hold for pods that are gone", "error", err)
	}
	return nil
}

// cniPod is the pod as plugins see it: the same for ADD and DEL. It fails only for what planPod refuses,
// now or in an older berth, so plugins were never told of such a pod.
func (m *Manager) cniPod(p *pod) (cni.Pod, error) {
	pod, err := cni.NewPod(p.id, p.rec.NetNS, p.config)
	if err != nil {
		return pod, err
	}
	pod.IPRanges = p.rec.IPRanges
	return pod, nil
}
