package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/client"
)

func execCommand(o *operator) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "exec CONTAINER COMMAND [ARG…]",
		Short: "Run a command in a container and exit with its code",
		Long: "Run a command in a container, without stdin and without a terminal. Its output\n" +
			"(at most 16 MiB) is printed when it has ended, and berth exits with its code.",
		Args: cobra.MinimumNArgs(2),
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "kill the command after this time, in whole seconds; 0: never")
	cmd.Flags().SetInterspersed(false) // flags after the container are the command's
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		container, err := c.FindContainer(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		ctx, stop := interruptible(cmd.Context())
		defer stop()
		reply, err := c.ExecSync(ctx, &runtimeapi.ExecSyncRequest{
			ContainerId: container.GetId(), Cmd: args[1:], Timeout: int64((timeout + time.Second - 1) / time.Second),
		})
		if err != nil {
			return interruptStatus(ctx, client.Explain("exec in container "+client.ShortID(container.GetId()), err))
		}
		_, outErr := cmd.OutOrStdout().Write(reply.GetStdout())
		_, errErr := cmd.ErrOrStderr().Write(reply.GetStderr())
		if err := errors.Join(outErr, errErr); err != nil {
			return err
		}
		if code := reply.GetExitCode(); code != 0 {
			return &exitStatus{code: int(code)}
		}
		return nil
	})
	return cmd
}
