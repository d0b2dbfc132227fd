package check

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berthd/daemon"
	"berth/cmd/config"
	"berth/image/registry"
)

// checkRegistry checks the hosts that serve name: a registry, a repository or an image.
func checkRegistry(ctx context.Context, cmd *cobra.Command, cfg *config.Config, name string, asJSON bool) error {
	withImage := strings.Contains(name, "/")
	if !withImage {
		name += "/check" // any repository: no request is for it
	}
	ref, err := registry.ParseReference(name)
	if err != nil {
		return err
	}
	client, err := registry.NewClient(registry.Config{
		Sources: daemon.Registries(cfg), StallTimeout: cfg.StallTimeout.Duration,
	})
	if err != nil {
		return err
	}
	probes := client.Diagnose(ctx, ref, withImage)
	if ctx.Err() != nil {
		return cli.InterruptStatus(ctx, ctx.Err())
	}
	if err := printProbes(cmd.OutOrStdout(), probes, asJSON); err != nil {
		return err
	}
	served := false // the last host decides, because mirrors may be down
	for _, p := range probes {
		served = p.OK
	}
	if !served {
		return &cli.ExitStatus{Code: 1}
	}
	return nil
}

func printProbes(w io.Writer, probes []registry.Probe, asJSON bool) error {
	if asJSON {
		return cli.PrintJSON(w, probes)
	}
	host := ""
	for _, p := range probes {
		if p.Host != host {
			host = p.Host
			if _, err := fmt.Fprintln(w, host); err != nil {
				return err
			}
		}
		level := "ok"
		if !p.OK {
			level = "failure"
		}
		if _, err := fmt.Fprintf(w, "  %-8s %-13s %s\n", level, p.Step, p.Found); err != nil {
			return err
		}
	}
	return nil
}
