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

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/cni"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/sandbox/state"
)

// Networks attaches pods to the node's network.
type Networks struct {
	network *cni.Network
	records *checkpoint.Dir
	turn    task.Lock // serializes changes of the pod CIDR
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
	return &Networks{network: network, records: records, turn: task.NewLock(), tasks: tasks, log: log}, nil
}

// Status returns the reason why new pods cannot have a network at the moment, or nil.
func (n *Networks) Status(ctx context.Context) error { return n.network.Status(ctx) }

// SetPodCIDR sets and records the node's pod CIDR, one or several comma-separated, as kubelet gets
// it from the control plane. New pods of networks with the ipRanges capability get it. Empty: none.
// The error is InvalidArgument for a malformed CIDR.
func (n *Networks) SetPodCIDR(ctx context.Context, cidr string) error {
	ranges, err := cni.ParsePodCIDRs(cidr)
	if err != nil {
		return err
	}
	return n.tasks.WithLock(ctx, n.turn, "update", "runtime config", func() error {
		if err := n.records.Write("runtime", state.Runtime{PodCIDR: cidr}); err != nil {
			return err
		}
		n.network.SetIPRanges(ranges)
		return nil
	})
}

// Load reads the pod CIDR that an earlier daemon recorded. damaged lists records that cannot be
// read.
func (n *Networks) Load() (damaged []checkpoint.Damaged, err error) {
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

// Plan chooses the network configuration and IP ranges of a pod and sets them in the record. The
// error is FailedPrecondition without a CNI configuration, and InvalidArgument when the pod's
// config cannot be passed to plugins.
func (n *Networks) Plan(rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) error {
	attachment, err := n.network.Plan()
	if err != nil {
		return err
	}
	rec.Network, rec.IPRanges = &attachment, n.network.IPRanges()
	_, err = cniPod(rec, config) // else DEL would fail as well, and would be retried forever
	return err
}

// Attach runs CNI ADD and sets the addresses in the record. The record already says that a DEL is
// due. For a pod on the node's network it does nothing.
func (n *Networks) Attach(ctx context.Context, rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) error {
	if rec.Network == nil {
		return nil
	}
	pod, err := cniPod(rec, config)
	if err != nil {
		return err
	}
	ctx, span := trace.Nest(ctx, "CNI ADD")
	defer span.End()
	defer n.tasks.Begin("CNI ADD", "pod "+rec.ID)()
	result, err := n.network.Add(ctx, *rec.Network, pod)
	if err != nil {
		return fmt.Errorf("attach pod %s to its network: %w", rec.ID, err)
	}
	rec.IPs = addressStrings(result.IPs)
	return nil
}

func addressStrings(ips []netip.Addr) []string {
	var list []string
	for _, ip := range ips {
		list = append(list, ip.String())
	}
	return list
}

// Detach runs CNI DEL with the same configuration as ADD.
func (n *Networks) Detach(ctx context.Context, rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) error {
	pod, err := cniPod(rec, config)
	if err != nil {
		n.log.Warn("skip CNI DEL: plugins never saw this pod, because its config cannot be passed to them",
			"pod", rec.ID, "error", err)
		return nil
	}
	ctx, span := trace.Nest(ctx, "CNI DEL")
	defer span.End()
	defer n.tasks.Begin("CNI DEL", "pod "+rec.ID)()
	return n.network.Del(ctx, *rec.Network, pod)
}

// Forget removes the cached ADD result of a detached pod.
func (n *Networks) Forget(id string) error { return n.network.DropCachedResults(id) }

// DetachOrphan runs CNI DEL for a pod without a record. It uses the present CNI configuration,
// because the one of the ADD was lost with the record. The error is FailedPrecondition when the
// node has no configuration and plugins may hold something for the pod.
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

// gcLimit limits how long a daemon's start waits for CNI GC. ADDs of new pods wait until GC has
// ended.
const gcLimit = 10 * time.Second

// Collect runs CNI GC: plugins release what they hold for pods that are not in pods, because their
// records were lost. It must start before the first request is served, so that pods is complete. A
// plugin that does not support GC, or is slow, does not stop the daemon from starting.
func (n *Networks) Collect(ctx context.Context, pods iter.Seq2[*state.PodRecord, *runtimeapi.PodSandboxConfig]) {
	var valid []cni.Pod
	for rec, config := range pods {
		if rec.Network == nil {
			continue
		}
		pod, err := cniPod(rec, config)
		if err != nil {
			n.log.Warn("CNI GC: the config of a pod cannot be passed to plugins, so they release what they hold for it", "pod",
				rec.ID, "error", err)
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
	}) // Spawn succeeds: Background is open while the daemon starts
	limit := time.NewTimer(gcLimit)
	defer limit.Stop()
	select {
	case <-ended:
	case <-ctx.Done():
	case <-limit.C:
		n.log.Warn("CNI GC is slow: the daemon starts without waiting, new pods wait for it")
	}
}

// Leave stops waiting for plugins when the daemon shuts down. Running plugins continue.
func (n *Networks) Leave() { n.network.Leave() }

// cniPod returns the pod as passed to plugins, the same for ADD and DEL. It fails only for a pod
// that Plan refuses, or would have refused in an older version, so plugins never saw such a pod.
func cniPod(rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) (cni.Pod, error) {
	pod, err := cni.NewPod(rec.ID, rec.NetNS, config)
	if err != nil {
		return pod, err
	}
	pod.IPRanges = rec.IPRanges
	return pod, nil
}
