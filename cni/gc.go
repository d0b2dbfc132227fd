package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"berth/internal/errdefs"
	"berth/internal/netns"
)

// GC removes the network resources of pods that are not in valid. It runs DEL for attachments in
// libcni's cache, with the configuration of their ADD. Then it runs GC with each plugin of a CNI
// 1.1 network, unless disableGC is set or the plugin lacks the verb. Last it releases addresses
// that a power failure left reserved without a pod. A failure does not stop the remaining steps;
// all errors are joined.
//
// valid must contain every pod that has an attachment or is about to get one. GC waits for running
// Add and Del calls and blocks new ones until it returns, as the specification requires. After
// Config.Timeout, or when ctx ends, GC starts no further plugin. Each plugin run has a separate
// timeout. Errors: Unavailable after [Network.Leave], DeadlineExceeded, otherwise Internal.
func (n *Network) GC(ctx context.Context, valid []Pod) error {
	end := n.cfg.Waits.Begin("CNI operations before GC", "all networks")
	err := n.passGate(ctx, wholeGate)
	end()
	if err != nil {
		return errdefs.New(errdefs.Code(err), "CNI GC: wait for running operations: %w", err)
	}
	return n.await("CNI GC", func() error {
		defer n.gate.Release(wholeGate)
		ctx, cancel := context.WithTimeout(ctx, n.cfg.Timeout)
		defer cancel()
		return n.collect(ctx, valid)
	})
}

// collect implements GC while the caller holds the gate. ctx limits the start of plugins, not their
// run.
func (n *Network) collect(ctx context.Context, valid []Pod) error {
	cached, err := n.dirs.Load().lib.GetCachedAttachments("")
	if err != nil {
		return errdefs.Internal("CNI GC: read cached attachments: %w", err)
	}
	keep := attachmentsOf(valid)
	lists := []*libcni.NetworkConfigList{}
	if v := n.view.Load(); v.net != nil {
		lists = append(lists, v.net.list)
	}
	var errs []error
	for _, a := range cached {
		if err := n.mayBegin(ctx); err != nil {
			return fmt.Errorf("CNI GC is incomplete: %w", errors.Join(append(errs, err)...))
		}
		list, err := parseConf(a.Config, true)
		if err != nil {
			errs = append(errs, fmt.Errorf("cached configuration of pod %s: %w", a.ContainerID, err))
			continue
		}
		if keep[types.GCAttachment{ContainerID: a.ContainerID, IfName: a.IfName}] {
			lists = addList(lists, list)
			continue
		}
		errs = append(errs, n.delStale(ctx, a, list))
	}
	for _, list := range lists {
		errs = append(errs, n.gcNetwork(ctx, list, keep), n.releaseOrphans(ctx, list))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("CNI GC: %w", err)
	}
	return nil
}

// attachmentsOf returns the attachments that pods may have. Each network's plugins receive all of
// them, because extra attachments do no harm.
func attachmentsOf(pods []Pod) map[types.GCAttachment]bool {
	keep := make(map[types.GCAttachment]bool, len(pods))
	for _, p := range pods {
		keep[types.GCAttachment{ContainerID: p.ID, IfName: IfName}] = true
	}
	return keep
}

// addList adds a list that existing pods use, unless lists contains it. The configuration directory
// may not contain it any more.
func addList(lists []*libcni.NetworkConfigList, list *libcni.NetworkConfigList) []*libcni.NetworkConfigList {
	for _, l := range lists {
		if bytes.Equal(l.Bytes, list.Bytes) {
			return lists
		}
	}
	return append(lists, list)
}

func (n *Network) delStale(ctx context.Context, a *libcni.NetworkAttachment, list *libcni.NetworkConfigList) error {
	n.log.Info("CNI GC deletes a stale attachment", "pod", a.ContainerID, "network", a.Network)
	ctx, cancel := n.pluginContext(ctx)
	defer cancel()
	err := n.dirs.Load().lib.DelNetworkList(ctx, list, &libcni.RuntimeConf{
		ContainerID:    a.ContainerID,
		NetNS:          netns.Existing(a.NetNS),
		IfName:         a.IfName,
		Args:           a.CniArgs,
		CapabilityArgs: a.CapabilityArgs,
	})
	if err != nil {
		return fmt.Errorf("delete stale attachment of pod %s to network %q: %w", a.ContainerID, a.Network, err)
	}
	return nil
}

// gcNetwork runs GC with each plugin of a network, and ignores plugins without that verb.
func (n *Network) gcNetwork(ctx context.Context, list *libcni.NetworkConfigList,
	keep map[types.GCAttachment]bool) error {
	if list.DisableGC || !supports11(list) {
		return nil
	}
	attachments := make([]types.GCAttachment, 0, len(keep))
	for a := range keep {
		attachments = append(attachments, a)
	}
	extra := map[string]any{
		"cni.dev/valid-attachments": attachments,
		"cni.dev/attachments":       attachments, // the key in specification 1.1.0 as first published (cni#1101)
	}
	var errs []error
	for _, p := range list.Plugins {
		if err := n.mayBegin(ctx); err != nil {
			return errors.Join(append(errs, err)...)
		}
		err := func() error {
			ctx, cancel := n.pluginContext(ctx)
			defer cancel()
			return n.runVerb(ctx, list, p, "GC", extra)
		}()
		if err != nil && !errors.Is(err, errVerbUnknown) {
			errs = append(errs, fmt.Errorf("network %q: %w", list.Name, err))
		}
	}
	return errors.Join(errs...)
}

// releaseOrphans releases addresses that IPAM plugins reserve without a pod.
func (n *Network) releaseOrphans(ctx context.Context, list *libcni.NetworkConfigList) error {
	var errs []error
	for _, ipam := range n.cfg.Readers.IPAMs {
		if err := ipam.ReleaseOrphans(ctx, list, n.log); err != nil {
			errs = append(errs, fmt.Errorf("release orphaned addresses of network %q: %w", list.Name, err))
		}
	}
	return errors.Join(errs...)
}
