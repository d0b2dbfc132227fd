package podenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"time"

	"berth/checkpoint/record"
	"berth/cni"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/sandbox/state"
)

// Networks attaches pods to the node's network.
type Networks struct {
	network *cni.Network
	records *record.Dir
	lock    task.Lock // serializes changes of the pod CIDR
	tasks   *task.Runner
	log     *slog.Logger
}

// OpenNetworks returns the node's network. The pod CIDR is recorded below root. The caller calls
// Load before it attaches the first pod.
func OpenNetworks(network *cni.Network, root string, tasks *task.Runner, log *slog.Logger) (*Networks, error) {
	records, err := state.OpenRuntime(root)
	if err != nil {
		return nil, err
	}
	records.Note(tasks.Begin)
	return &Networks{network: network, records: records, lock: task.NewLock(), tasks: tasks, log: log}, nil
}

// Status returns the reason why new pods cannot have a network at the moment, or nil.
func (n *Networks) Status(ctx context.Context) error { return n.network.Status(ctx) }

// SetPodCIDR sets and records the node's pod CIDR, as kubelet gets it from the control plane: one
// CIDR, or several separated by commas. New pods of networks with the ipRanges capability get
// addresses in these CIDRs. An empty string unsets it. The error is InvalidArgument for a malformed
// CIDR.
func (n *Networks) SetPodCIDR(ctx context.Context, cidr string) error {
	ranges, err := cni.ParsePodCIDRs(cidr)
	if err != nil {
		return err
	}
	return n.tasks.WithLock(ctx, n.lock, "update", "runtime config", func() error {
		if err := n.records.Write("runtime", state.Runtime{PodCIDR: cidr}); err != nil {
			return err
		}
		n.network.SetIPRanges(ranges)
		return nil
	})
}

// Load reads the pod CIDR that an earlier daemon recorded. damaged lists records that cannot be
// read.
func (n *Networks) Load() (damaged []record.Damaged, err error) {
	return n.records.Load(func(_ string, _ int, body []byte) error {
		var rec state.Runtime
		if err := json.Unmarshal(body, &rec); err != nil {
			return err
		}
		ranges, err := cni.ParsePodCIDRs(rec.PodCIDR)
		if err != nil {
			return err
		}
		n.network.SetIPRanges(ranges)
		return nil
	})
}

// Plan chooses the network configuration of a pod and the address ranges that it may use. spec has
// the pod's ID, network namespace and config. The error is FailedPrecondition if there is no
// configuration. InvalidArgument for a config that cannot be passed to CNI plugins.
func (n *Networks) Plan(spec *state.PodSpec) (cni.Attachment, [][]cni.IPRange, error) {
	attachment, err := n.network.Plan()
	if err != nil {
		return attachment, nil, err
	}
	_, err = cniPod(spec) // otherwise DEL would fail too, and the pod could never be removed
	return attachment, n.network.IPRanges(), err
}

// Attach runs CNI ADD and returns the pod's addresses. The pod's record already shows that a DEL is
// due. attachment is nil for a pod on the node's network, which needs no ADD. A pod without an
// address is FailedPrecondition, because kubelet would replace its sandbox again and again.
func (n *Networks) Attach(
	ctx context.Context, spec *state.PodSpec, attachment *cni.Attachment,
) (ips []string, err error) {
	if attachment == nil {
		return nil, nil
	}
	pod, err := cniPod(spec)
	if err != nil {
		return nil, err
	}
	ctx, span := trace.Nest(ctx, "CNI ADD")
	defer span.End()
	defer n.tasks.Begin("CNI ADD", spec.String())()
	result, err := n.network.Add(ctx, *attachment, pod)
	if err != nil {
		return nil, fmt.Errorf("attach pod %s to its network: %w", spec.ID, err)
	}
	if len(result.IPs) == 0 {
		return nil, errdefs.FailedPrecondition("CNI ADD of network %q returned no address for pod %s",
			attachment.Network, spec.ID)
	}
	return addressStrings(result.IPs), nil
}

func addressStrings(ips []netip.Addr) []string {
	var list []string
	for _, ip := range ips {
		list = append(list, ip.String())
	}
	return list
}

// Detach runs CNI DEL with the configuration that ADD had.
func (n *Networks) Detach(ctx context.Context, spec *state.PodSpec, attachment cni.Attachment) error {
	pod, err := cniPod(spec)
	if err != nil {
		n.log.Warn("skip CNI DEL: plugins never saw this pod, because its config cannot be passed to them",
			"pod", spec.ID, "error", err)
		return nil
	}
	ctx, span := trace.Nest(ctx, "CNI DEL")
	defer span.End()
	defer n.tasks.Begin("CNI DEL", spec.String())()
	return n.network.Del(ctx, attachment, pod)
}

// Forget removes the cached ADD result of a detached pod.
func (n *Networks) Forget(id string) error { return n.network.DropCachedResults(id) }

// DetachOrphan runs CNI DEL for a pod without a record. It uses the present CNI configuration,
// because the configuration of the ADD was lost with the record. The error is FailedPrecondition if
// the node has no configuration and plugins may hold resources of the pod.
func (n *Networks) DetachOrphan(ctx context.Context, id, netns string) error {
	network, err := n.network.Plan()
	if err != nil {
		held, heldErr := n.network.MayHold(id, netns)
		if !held && heldErr == nil {
			return nil
		}
		err = errors.Join(err, heldErr)
	}
	if err != nil {
		return fmt.Errorf("detach orphan %s: %w", id, err)
	}
	if err := n.network.Del(ctx, network, cni.Pod{ID: id, NetNS: netns}); err != nil {
		return fmt.Errorf("detach orphan %s: %w", id, err)
	}
	return nil
}

// gcTimeout limits how long a daemon's start waits for CNI GC. ADDs of new pods wait until GC has
// ended.
const gcTimeout = 10 * time.Second

// Collect runs CNI GC, which releases the resources of all pods except attached, such as pods whose
// records were lost. It runs before the first request, so attached is complete. A slow plugin does
// not delay the daemon's start.
func (n *Networks) Collect(ctx context.Context, attached iter.Seq[*state.PodSpec]) {
	var valid []cni.Pod
	for spec := range attached {
		pod, err := cniPod(spec)
		if err != nil {
			n.log.Warn("CNI GC: the config of a pod cannot be passed to plugins, so they release its addresses",
				"pod", spec.ID, "error", err)
			continue
		}
		valid = append(valid, pod)
	}
	ended := make(chan struct{})
	n.tasks.Background.Spawn(func() {
		defer close(ended)
		defer n.tasks.Begin("CNI GC", "all networks")()
		err := n.tasks.Guard("run CNI GC of", "all networks",
			func() error { return n.network.GC(n.tasks.Background.Context(), valid) })
		if err != nil {
			n.log.Warn("CNI GC failed", "error", err)
		}
	}) // Spawn succeeds, because Background is open while the daemon starts
	limit := time.NewTimer(gcTimeout)
	defer limit.Stop()
	select {
	case <-ended:
	case <-ctx.Done():
	case <-limit.C:
		n.log.Warn("CNI GC is slow: the daemon starts without waiting, new pods wait for it")
	}
}

// OnChange sets a function that is called after the CNI configuration has changed, or a network has
// become ready. It must not block.
func (n *Networks) OnChange(call func()) { n.network.OnChange(call) }

// Leave stops waiting for plugins when the daemon shuts down. Running plugins continue.
func (n *Networks) Leave() { n.network.Leave() }

// cniPod returns the pod as passed to plugins, the same for ADD and DEL. It fails only for a pod
// that Plan of this or an older version refuses, so plugins never saw such a pod.
func cniPod(spec *state.PodSpec) (cni.Pod, error) {
	pod, err := cni.NewPod(spec.ID, spec.NetNS, spec.Config)
	if err != nil {
		return pod, err
	}
	pod.IPRanges, pod.PreferredIPs = spec.IPRanges, spec.PreferredIPs
	return pod, nil
}
