package cni

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/libcni"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/netns"
	"berth/internal/task"
)

// Attachment describes how a pod is connected. Its zero value means no connection. [Network.Plan]
// returns it, and the caller stores it with the pod's record before [Network.Add].
type Attachment struct {
	Network  string `json:"network,omitempty"`
	IfName   string `json:"ifName,omitempty"`
	ConfList []byte `json:"confList,omitempty"` // the complete configuration list that ADD uses
}

// Add connects a pod and returns its addresses. The caller runs [Network.Del] after any error,
// because some plugins of the chain may have succeeded.
//
// Errors:
//   - InvalidArgument: the pod fails [Pod.Validate].
//   - FailedPrecondition: a plugin is not installed or refuses its configuration.
//   - DeadlineExceeded: a plugin was killed.
//   - DeadlineExceeded or Canceled: ctx ended before a plugin started.
//   - Unavailable: the plugin asks to try again, or [Network.Leave] was called.
//   - Internal: any other failure.
//
// If a plugin reported the failure, the error wraps a *types.Error.
func (n *Network) Add(ctx context.Context, att Attachment, pod Pod) (Result, error) {
	if err := pod.Validate(); err != nil {
		return Result{}, err
	}
	if pod.NetNS == "" {
		return Result{}, errdefs.InvalidArgument("CNI ADD of pod %s: no network namespace", pod.ID)
	}
	var result Result
	err := n.operate(ctx, att, pod, "ADD", func(ctx context.Context, list *libcni.NetworkConfigList,
		rt *libcni.RuntimeConf) error {
		n.warnUnusedPorts(list, pod)
		r, err := n.dirs.Load().lib.AddNetworkList(ctx, list, rt)
		if err != nil {
			return err
		}
		result, err = newResult(r, att.IfName)
		return err
	})
	if err != nil {
		return Result{}, err // after Leave the plugin may still be writing result
	}
	return result, nil
}

// Del disconnects a pod with the configuration that its Add used. It is idempotent and works when
// the network namespace is gone. The caller repeats it until it returns nil. It returns the same
// errors as [Network.Add].
//
// Del returns nil for a pod that fails [Pod.Validate] or has no attachment, because no plugin ran
// for it.
func (n *Network) Del(ctx context.Context, att Attachment, pod Pod) error {
	if len(att.ConfList) == 0 || pod.Validate() != nil {
		return nil
	}
	pod.NetNS = netns.Existing(pod.NetNS) // plugins clean up outside of the namespace if CNI_NETNS is "" (specification, DEL)
	return n.operate(ctx, att, pod, "DEL", n.dirs.Load().lib.DelNetworkList)
}

type operation func(context.Context, *libcni.NetworkConfigList, *libcni.RuntimeConf) error

// operate runs one operation of one pod, with its own deadline, while no GC runs.
func (n *Network) operate(ctx context.Context, att Attachment, pod Pod, verb string, op operation) error {
	what := fmt.Sprintf("CNI %s of pod %s to network %q", verb, pod.ID, att.Network)
	list, err := parseConf(att.ConfList, true)
	if err != nil {
		return errdefs.FailedPrecondition("%s: stored configuration: %w", what, err)
	}
	if err := n.awaitGC(ctx, pod); err != nil {
		return errdefs.New(errdefs.Code(err), "%s: wait for CNI GC: %w", what, err)
	}
	err = n.await(what, func() error {
		defer n.gate.Release(1)
		ctx, cancel := n.pluginContext(ctx)
		defer cancel()
		err := op(ctx, list, pod.runtimeConf(att.IfName))
		failpoint.Reach("cni.result-saved")
		return err
	})
	if errdefs.Code(err) == codes.Unknown { // libcni failed, not a plugin
		return errdefs.Internal("%s: %w", what, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// awaitGC waits until no GC runs.
func (n *Network) awaitGC(ctx context.Context, pod Pod) error {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Timeout)
	defer cancel()
	defer n.cfg.Waits.Begin("end of CNI GC", "pod "+pod.ID)()
	return n.passGate(ctx, 1)
}

// passGate waits for the gate until ctx ends or Leave is called.
func (n *Network) passGate(ctx context.Context, weight int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.left, cancel)()
	err := n.mayBegin(ctx)
	if err == nil {
		err = n.gate.Acquire(ctx, weight)
	}
	if err != nil && n.left.Err() != nil {
		err = n.mayBegin(ctx)
	}
	return err
}

// mayBegin returns why no further plugin may start, or nil.
func (n *Network) mayBegin(ctx context.Context) error {
	if n.left.Err() != nil {
		return errdefs.Unavailable("berth is stopping")
	}
	return ctx.Err()
}

// pluginContext returns the context of an operation's plugins. It ends after Config.Timeout, and
// does not end with the caller's context.
func (n *Network) pluginContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), n.cfg.Timeout)
}

// await runs a function that executes plugins. It waits until the function returns or Leave is
// called.
func (n *Network) await(what string, run func() error) error {
	done := make(chan task.Outcome, 1)
	go func() { done <- task.Catch(run) }() // ends before await returns, or when the process exits
	select {
	case outcome := <-done:
		return outcome.Result()
	case <-n.left.Done():
		return errdefs.Unavailable("%s: berth is stopping, the plugin continues", what)
	}
}

// warnUnusedPorts logs host ports that no plugin of the network opens, and host ports at ::1, which
// the kernel cannot redirect.
func (n *Network) warnUnusedPorts(list *libcni.NetworkConfigList, pod Pod) {
	if len(pod.PortMappings) == 0 {
		return
	}
	for _, p := range pod.PortMappings {
		if ip, err := netip.ParseAddr(p.HostIP); err == nil && ip == netip.IPv6Loopback() {
			n.log.Warn("the host port is not reachable at ::1, the kernel cannot redirect from there", "pod", pod.ID,
				"port", p.HostPort)
		}
	}
	for _, p := range list.Plugins {
		if p.Network.Capabilities[capPortMappings] {
			return
		}
	}
	n.log.Warn("host ports are not open: no plugin of the network has the portMappings capability", "pod", pod.ID,
		"network", list.Name)
}
