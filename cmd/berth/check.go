package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"berth/cmd/berth/nodecheck"
	"berth/internal/config"
	"berth/internal/host"
)

func newCheckCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Tell what the node lacks, and how to mend it",
		Long: `Tell what the node lacks to run berth and kubelet's pods on it: kernel features,
cgroups, directories, mount propagation, programs, sockets that other runtimes have, what
networks are built with, the CNI network. It changes nothing and needs no daemon. It fails if no pod could run; a node whose CNI network
is not installed yet runs those with the host's network.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(cmd.Flags())
			if err != nil {
				return err
			}
			node, err := checkedNode(cfg)
			if err != nil {
				return err
			}
			ctx, stop := interruptible(cmd.Context()) // what is tried is undone
			defer stop()
			findings := nodecheck.Run(ctx, node)
			if ctx.Err() != nil {
				return interruptStatus(ctx, ctx.Err())
			}
			if err := printFindings(cmd.OutOrStdout(), findings, asJSON); err != nil {
				return err
			}
			if nodecheck.Worst(findings) == nodecheck.Failure {
				return &exitStatus{code: 1}
			}
			return nil
		},
	}
	config.AddFlags(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	return cmd
}

// checkedNode is what the daemon would start with. What else keeps a daemon from starting it finds
// when it takes it, and says so itself: sockets and directories that somebody else has.
func checkedNode(cfg *config.Config) (*nodecheck.Node, error) {
	facts, err := host.Detect("/")
	if err != nil {
		return nil, err
	}
	systemd, err := systemdCgroup(cfg.CgroupDriver, systemdRunning, facts.CgroupV2)
	if err != nil {
		systemd = true // configured so, and a finding
	}
	n := &nodecheck.Node{Config: cfg, Facts: facts, SystemdCgroup: systemd, Network: networkConfig(cfg)}
	n.Shim, n.ShimError = findShim(cfg.ShimPath)
	n.Unpack, n.UnpackError = findUnpack(cfg.UnpackPath)
	return n, nil
}

func printFindings(w io.Writer, findings []nodecheck.Finding, asJSON bool) error {
	if asJSON {
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(findings)
	}
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%-8s %s: %s\n", f.Level, f.Subject, f.Found); err != nil {
			return err
		}
		if f.Mend == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%8s → %s\n", "", f.Mend); err != nil {
			return err
		}
	}
	return nil
}
