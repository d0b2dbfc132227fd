package operator

import (
	"context"
	"errors"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

func attachCommand(o *Connection) *cobra.Command {
	var s session
	cmd := &cobra.Command{
		Use:   "attach CONTAINER|POD",
		Short: "Attach to a container's main process",
		Long: `Attach to the input and output of a container's main process until it ends.

Ctrl-C detaches, and the container keeps running. With -it Ctrl-C goes to the
container, and Ctrl-P Ctrl-Q detaches.`,
		Args: cli.Args(1, 1, "name a container or pod"),
	}
	s.addFlags(cmd)
	containerName := o.addContainerFlag(cmd)
	cmd.ValidArgsFunction = o.completeNames(runningNames, podNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		container, err := findRunning(cmd.Context(), c, args[0], *containerName)
		if err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		session, leave := context.WithCancelCause(ctx)
		defer leave(nil)
		if s.stdin && s.terminal {
			s.leave = func() { leave(errLeft) }
		}
		err = s.run(session, cmd, func(ctx context.Context) (string, error) {
			reply, err := c.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: container.GetId(),
				Tty: s.terminal, Stdin: s.stdin, Stdout: true, Stderr: !s.terminal})
			return reply.GetUrl(), err
		})
		if errors.Is(context.Cause(session), errLeft) && errors.Is(err, context.Canceled) {
			return nil
		}
		return cli.Silent(sessionStatus(ctx, "attach to container "+client.ContainerName(container), err))
	})
	return cmd
}

var errLeft = errors.New("left by Ctrl-P Ctrl-Q")
