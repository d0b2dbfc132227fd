package operator

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
)

// fromManifest asks for the grace period of the pod's manifest.
const fromManifest = -1 * time.Second

func stopCommand(o *Connection) *cobra.Command {
	var timeout time.Duration
	var runDir string
	cmd := &cobra.Command{
		Use:   "stop NAME…",
		Short: "Stop containers or pods",
		Long: `Stop containers or pods, given by name, ID or a prefix of the ID.

A pod's containers get its grace period, then the pod's network is removed. A
stopped pod can be inspected until "berth rm".`,
		Args: cli.Args(1, 0, "name a container or pod"),
	}
	cli.DurationVarP(cmd.Flags(), &timeout, "timeout", "t", fromManifest, "grace period before SIGKILL (default: the manifest's, or 30s)")
	cmd.Flags().StringVar(&runDir, "run-dir", defaultRunDir, "directory in which berth run keeps pods' files")
	cmd.Flags().Lookup("timeout").DefValue = "0s" // not shown: the text states the default
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		return cli.InterruptStatus(ctx, each(args, func(ref string) error { return stopRef(ctx, c, ref, runDir, timeout) }))
	})
	return cmd
}

func stopRef(ctx context.Context, c *client.Client, ref, runDir string, timeout time.Duration) error {
	container, pod, err := c.Find(ctx, ref)
	if err != nil {
		return err
	}
	if pod != nil {
		return podrun.Stop(ctx, c, pod, runDir, timeout)
	}
	if timeout < 0 {
		timeout = podrun.DefaultGrace
	}
	return c.Stop(ctx, container.GetId(), timeout)
}

// each calls do for every reference, also after an error, and joins the errors.
func each(refs []string, do func(ref string) error) error {
	var errs []error
	for _, ref := range refs {
		errs = append(errs, do(ref))
	}
	return errors.Join(errs...)
}
