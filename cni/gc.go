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

// GC removes what networks hold for pods that are not in valid: attachments in
// libcni's records get DEL with the configuration they were made with, then the
// plugins of networks of version 1.1 get GC, unless disableGC is set. Plugins
// without the verb are passed over. Addresses that a power cut left reserved for nobody are
// given back. One failure does not stop the rest, all are joined.
//
// valid must hold every pod that has, or is about to get, an attachment. GC waits for
// running Add and Del calls and keeps new ones waiting until it is done, as the
// specification demands. After Config.Timeout, or when ctx ends, no plugin is begun any more; one that runs has
// its own time. Errors: Unavailable after Leave, DeadlineExceeded, else Internal.
func (n *Network) GC(ctx context.Context, valid []Pod) error {
	end := n.cfg.Waits.Begin("CNI operations to end before GC", "all networks")
	err := n.passGate(ctx, wholeGate)
	end()
	if err != nil {
		return errdefs.New(errdefs.Code(err), "CNI GC: waiting for running operations: %w", err)
	}
	return n.await("CNI GC", func() error {
		defer n.gate.Release(wholeGate)
		ctx, cancel := context.WithTimeout(ctx, n.cfg.Timeout)
		defer cancel()
		return n.collect(ctx, valid)
	})
}

// collect is GC behind the gate. ctx bounds the beginning of plugins, not the plugins.
func (n *Network) collect(ctx context.Context, valid []Pod) error {
	cached, err := n.lib.GetCachedAttachments("")
	if err != nil {
		return errdefs.Internal("CNI GC: read recorded attachments: %w", err)
	}
	keep := attachmentsOf(valid)
	lists := []*libcni.NetworkConfigList{}
	if v := n.view.Load(); v.net != nil {
		lists = append(lists, v.net.list)
	}
	var errs []error
	for _, a := range cached {
		if err := n.mayBegin(ctx); err != nil {
			return fmt.Errorf("CNI GC is not done: %w", errors.Join(append(errs, err)...))
		}
		list, err := parseConf(a.Config, true)
		if err != nil {
			errs = append(errs, fmt.Errorf("recorded configuration of pod %s: %w", a.ContainerID, err))
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

// attachmentsOf returns the attachments pods may have. Plugins are told all of
// them, whatever the network: a superset only makes GC more careful.
func attachmentsOf(pods []Pod) map[types.GCAttachment]bool {
	keep := make(map[types.GCAttachment]bool, len(pods))
	for _, p := range pods {
		keep[types.GCAttachment{ContainerID: p.ID, IfName: IfName}] = true
	}
	return keep
}

// addList adds a network that old pods still use and the configuration directory
// may not have any more.
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
	err := n.lib.DelNetworkList(ctx, list, &libcni.RuntimeConf{
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

// gcNetwork runs the verb for each plugin of a network that has it.
func (n *Network) gcNetwork(ctx context.Context, list *libcni.NetworkConfigList, keep map[types.GCAttachment]bool) error {
	if list.DisableGC || !supports11(list) {
		return nil
	}
	attachments := make([]types.GCAttachment, 0, len(keep))
	for a := range keep {
		attachments = append(attachments, a)
	}
	extra := map[string]any{
		"cni.dev/valid-attachments": attachments,
		"cni.dev/attachments":       attachments, // the name in spec 1.1.0 as first published (cni#1101)
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

// releaseOrphans frees addresses that IPAM plugins keep for no pod.
func (n *Network) releaseOrphans(ctx context.Context, list *libcni.NetworkConfigList) error {
	var errs []error
	for _, ipam := range n.cfg.Readers.IPAMs {
		if err := ipam.ReleaseOrphans(ctx, list, n.log); err != nil {
			errs = append(errs, fmt.Errorf("release orphaned addresses of network %q: %w", list.Name, err))
		}
	}
	return errors.Join(errs...)
}
