package nodecheck

import (
	"context"
	"fmt"
	"strings"

	"berth/cni"
	"berth/sandbox/state"
)

// checkNetwork selects the network with package cni, as the daemon does, and asks its plugins
// (STATUS).
func checkNetwork(ctx context.Context, n *Node) []Finding {
	const subject = "CNI network"
	network, err := cni.New(n.Network, quiet())
	if err != nil {
		return []Finding{lacking(Failure, subject, err.Error(), "fix cni.conf_dir and cni.bin_dirs")}
	}
	defer network.Close()
	var findings []Finding
	if err := setRanges(network, n.Config.Root); err != nil {
		findings = append(
			findings,
			lacking(
				Warning,
				"pod CIDR",
				err.Error(),
				"repair that record; until then this check uses the addresses of the network's configuration",
			),
		)
	}
	statusErr := network.AskStatus(ctx)
	info := network.Info()
	for _, s := range info.Skipped {
		findings = append(findings,
			lacking(Warning, "CNI configuration", fmt.Sprintf("%s: %s", s.File, s.Error), "correct or remove it"))
	}
	if statusErr != nil && n.Network.List != nil {
		return append(
			findings,
			lacking(
				Warning,
				subject,
				statusErr.Error(),
				"fix it, if necessary by options in [network], or set network.type to cni; until then only pods on the host's network run",
			),
		)
	}
	if statusErr != nil {
		// This is only a warning: a new node has no network until pods on the host's network
		// install it.
		return append(findings, lacking(
			Warning,
			subject,
			statusErr.Error(),
			fmt.Sprintf(
				"install a CNI network (configuration in %s, plugins in %s); until then only pods on the host's network run",
				info.ConfDir,
				strings.Join(info.BinDirs, " or "),
			),
		))
	}
	if n.Network.List != nil {
		return append(findings, ok(subject, "built-in"))
	}
	return append(findings, ok(subject, "%s from %s: %s", info.Network, info.File, strings.Join(info.Plugins, ", ")))
}

// setRanges sets the address ranges that the daemon would use, from the pod CIDR that it has
// received.
func setRanges(network *cni.Network, root string) error {
	cidr, err := state.PodCIDR(root)
	if err != nil {
		return err
	}
	ranges, err := cni.ParsePodCIDRs(cidr)
	if err != nil {
		return err
	}
	network.SetIPRanges(ranges)
	return nil
}
