package operator

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
)

func rmCommand(o *Connection) *cobra.Command {
	var force bool
	var runDir string
	cmd := &cobra.Command{
		Use:   "rm NAME…",
		Short: "Remove containers or pods",
		Long: `Remove containers or pods, given by name, ID or a prefix of the ID.

Without --force, berth refuses to remove running ones. With it, containers are
killed, and pods are stopped within their grace period first.`,
		Args: cli.Args(1, 0, "name a container or pod"),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also remove running pods and containers")
	cmd.Flags().StringVar(&runDir, "run-dir", defaultRunDir, "directory in which berth run keeps pods' files")
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		return each(args, func(ref string) error { return removeRef(cmd.Context(), c, ref, runDir, force) })
	})
	return cmd
}

func removeRef(ctx context.Context, c *client.Client, ref, runDir string, force bool) error {
	container, pod, err := c.Find(ctx, ref)
	switch {
	case err != nil:
		return err
	case pod != nil:
		return removePod(ctx, c, pod, runDir, force)
	case container.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING && !force:
		return fmt.Errorf("container %s is running; stop it with crictl, or use --force", client.ContainerName(container))
	}
	return c.Remove(ctx, container.GetId())
}

// removePod removes a pod, and its files if `berth run` created them.
func removePod(ctx context.Context, c *client.Client, pod *runtimeapi.PodSandbox, runDir string, force bool) error {
	if pod.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY {
		if !force {
			return fmt.Errorf("pod %s is running; stop it with crictl, or use --force", client.PodTitle(pod))
		}
		if err := podrun.Stop(ctx, c, pod.GetId()); err != nil {
			return err
		}
	}
	if err := c.RemovePod(ctx, pod.GetId()); err != nil {
		return err
	}
	return podrun.RemoveFiles(runDir, pod.GetMetadata().GetUid())
}

// each calls do for every reference, also after an error, and joins the errors.
func each(refs []string, do func(ref string) error) error {
	var errs []error
	for _, ref := range refs {
		errs = append(errs, do(ref))
	}
	return errors.Join(errs...)
}
