package operator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

func execCommand(o *connection) *cobra.Command {
	var timeout time.Duration
	var s session
	cmd := &cobra.Command{
		Use:   "exec CONTAINER COMMAND [ARG…]",
		Short: "Run a command in a container and exit with its code",
		Long: `Run a command in a container, print its output, and exit with its code.

If the connection ends, berth kills the command and all processes it started.
Other runtimes may let it run on.`,
		Example: "  berth exec -it web sh\n  berth exec web ls -l /\n  tar c . | berth exec -i web tar x -C /data",
		Args:    cobra.MinimumNArgs(2),
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "kill the command after this time; 0: never")
	s.addFlags(cmd)
	cmd.Flags().SetInterspersed(false) // flags after the container belong to the command
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		container, err := c.FindContainer(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		limited, cancel := limitTime(ctx, timeout)
		defer cancel()
		err = s.run(limited, cmd, func(ctx context.Context) (string, error) {
			reply, err := c.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: container.GetId(), Cmd: args[1:],
				Tty: s.terminal, Stdin: s.stdin, Stdout: true, Stderr: !s.terminal})
			return reply.GetUrl(), err
		})
		ended := errors.Is(err, context.DeadlineExceeded) ||
			errors.Is(err, os.ErrDeadlineExceeded) // the latter from the handshake
		if end, ok := limited.Deadline(); ok && ended && !time.Now().Before(end) {
			<-limited.Done() // the connection's own timer may fire a moment earlier
		}
		if cause := context.Cause(limited); errors.Is(cause, errTimeout) && ended {
			err = fmt.Errorf("%w after %v", cause, timeout)
		}
		return sessionStatus(ctx, "exec in container "+client.ShortID(container.GetId()), err)
	})
	return cmd
}

var errTimeout = errors.New("command timed out")

// limitTime returns a context that ends after timeout with the cause errTimeout. 0 means no limit.
func limitTime(parent context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == 0 {
		return context.WithCancel(parent)
	}
	return context.WithTimeoutCause(parent, timeout, errTimeout)
}

// sessionStatus explains an error of a session. A command's exit status needs no explanation.
func sessionStatus(ctx context.Context, what string, err error) error {
	var exit *cli.ExitStatus
	if err == nil || errors.As(err, &exit) {
		return err
	}
	return cli.InterruptStatus(ctx, client.Explain(what, err))
}
