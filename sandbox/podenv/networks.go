package podenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/cni"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/sandbox/state"
)

// Networks is the node's network, as pods are attached to it.
type Networks struct {
	network *cni.Network
	records *checkpoint.Dir
	turn    task.Turn                       // of who changes the pod CIDR
	ranges  atomic.Pointer[[][]cni.IPRange] // from the node's pod CIDR
	tasks   *task.Runner
	log     *slog.Logger
}

// OpenNetworks returns the node's network. The pod CIDR is written down below root; Load comes before the first pod.
func OpenNetworks(network *cni.Network, root string, tasks *task.Runner, log *slog.Logger) (*Networks, error) {
	records, err := state.OpenRuntime(root)
	if err != nil {
		return nil, err
	}
	records.Note(tasks.Begin)
	n := &Networks{network: network, records: records, turn: task.NewTurn(), tasks: tasks, log: log}
	n.ranges.Store(new([][]cni.IPRange))
	return n, nil
}

// Status tells why pods can't have a network at the moment, or nil.
func (n *Networks) Status(ctx context.Context) error { return n.network.Status(ctx) }

// SetPodCIDR takes the node's pod CIDR, one or several comma-separated, as
// kubelet passes it on from the control plane. Networks that declare the ipRanges
// capability get it with every new pod. Empty: none. InvalidArgument otherwise.
func (n *Networks) SetPodCIDR(ctx context.Context, cidr string) error {
	ranges, err := cni.ParsePodCIDRs(cidr)
	if err != nil {
		return err
	}
	return n.tasks.WithTurn(ctx, n.turn, "update", "runtime config", func() error {
		if err := n.records.Write("runtime", state.Runtime{PodCIDR: cidr}); err != nil {
			return err
		}
		n.setRanges(ranges)
		return nil
	})
}

func (n *Networks) setRanges(ranges [][]cni.IPRange) {
	n.ranges.Store(&ranges)
	n.network.SetIPRanges(ranges)
}

// Load reads the pod CIDR that kubelet told an earlier daemon. damaged are records that can't be trusted.
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
		n.setRanges(ranges)
		return nil
	})
}

// Plan decides what a pod is to be attached with, and notes it in the record. FailedPrecondition without a
// configuration, InvalidArgument for a pod that plugins can't be told of.
func (n *Networks) Plan(rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) error {
	attachment, err := n.network.Plan()
	if err != nil {
		return err
	}
	rec.Network, rec.IPRanges = &attachment, *n.ranges.Load()
	_, err = cniPod(rec, config) // or DEL would fail, too, and never be done
	return err
}

// Attach runs CNI ADD and notes the addresses in the record; that a DEL is due was written before. A pod
// on the node's network has nothing to attach.
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

// Detach runs CNI DEL with the configuration that ADD had.
func (n *Networks) Detach(ctx context.Context, rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) error {
	pod, err := cniPod(rec, config)
	if err != nil {
		n.log.Warn("a pod can't be told to CNI plugins: it has no network to be detached from", "pod", rec.ID, "error", err)
		return nil
	}
	ctx, span := trace.Nest(ctx, "CNI DEL")
	defer span.End()
	defer n.tasks.Begin("CNI DEL", "pod "+rec.ID)()
	return n.network.Del(ctx, *rec.Network, pod)
}

// Forget removes what is kept of a pod that was detached.
func (n *Networks) Forget(id string) error { return n.network.DropCachedResults(id) }

// DetachUnrecorded runs CNI DEL for what was a pod, with the configuration that there is now: the one that its
// ADD used is lost with the record. FailedPrecondition if there is none, and something may be held for the pod.
func (n *Networks) DetachUnrecorded(ctx context.Context, id, netns string) error {
	network, err := n.network.Plan()
	if err != nil {
		held, heldErr := n.network.MayHold(id, netns)
		if !held && heldErr == nil {
			return nil
		}
		err = errors.Join(err, heldErr)
	}
	if err != nil {
		return fmt.Errorf("detach what is left of %s: %w", id, err)
	}
	if err := n.network.Del(ctx, network, cni.Pod{ID: id, NetNS: netns}); err != nil {
		return fmt.Errorf("detach what is left of %s: %w", id, err)
	}
	return nil
}

// gcLimit bounds the start's wait for the collection. Pods that come before its end wait for it.
const gcLimit = 10 * time.Second

// Collect gives back what networks hold for pods that are not among these: of records that were
// lost. It begins before the first request, so that every pod there can be is known. A plugin that can't do it, or
// takes long, keeps nobody from starting.
func (n *Networks) Collect(ctx context.Context, pods iter.Seq2[*state.PodRecord, *runtimeapi.PodSandboxConfig]) {
	var valid []cni.Pod
	for rec, config := range pods {
		if rec.Network == nil {
			continue
		}
		pod, err := cniPod(rec, config)
		if err != nil {
			n.log.Warn("a pod can't be told to CNI plugins: what they hold for it is given back", "pod", rec.ID, "error", err)
			continue
		}
		valid = append(valid, pod)
	}
	ended := make(chan struct{})
	n.tasks.Background.Spawn(func() {
		defer close(ended)
		defer n.tasks.Begin("CNI GC", "all networks")()
		err := n.tasks.Guard("collect", "what networks hold", func() error { return n.network.GC(n.tasks.Background.Context(), valid) })
		if err != nil {
			n.log.Warn("collect what networks hold for pods that are gone", "error", err)
		}
	}) // nothing closes Background while the daemon starts
	limit := time.NewTimer(gcLimit)
	defer limit.Stop()
	select {
	case <-ended:
	case <-ctx.Done():
	case <-limit.C:
		n.log.Warn("CNI GC takes long: the start goes on without it, new pods wait for it")
	}
}

// Leave is for a daemon that ends: who waits for plugins waits no more, and the plugins go on.
func (n *Networks) Leave() { n.network.Leave() }

// cniPod is the pod as plugins see it: the same for ADD and DEL. It fails only for what Plan refuses,
// now or in an older berth, so plugins were never told of such a pod.
func cniPod(rec *state.PodRecord, config *runtimeapi.PodSandboxConfig) (cni.Pod, error) {
	pod, err := cni.NewPod(rec.ID, rec.NetNS, config)
	if err != nil {
		return pod, err
	}
	pod.IPRanges = rec.IPRanges
	return pod, nil
}
