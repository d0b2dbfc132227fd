package operator

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/internal/pidfd"
)

func killCommand(o *Connection) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "kill NAME…",
		Short: "Send a signal to the main process of containers",
		Long: `Send a signal to the main process of containers, or of all running containers of pods.

KILL goes through the runtime and ends all processes of the container. CRI has no call
for other signals: berth sends them to the process itself, so the command must run on
the node.`,
		Example: "  berth kill web/app\n  berth kill --signal HUP web/app",
		Args:    cli.Args(1, 0, "name a container or pod"),
	}
	cmd.Flags().StringVarP(&name, "signal", "s", "KILL", "signal: a name such as HUP or SIGHUP, or a number")
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		signal, err := parseSignal(name)
		if err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		return cli.InterruptStatus(ctx, each(args, func(ref string) error { return killRef(ctx, c, ref, signal) }))
	})
	return cmd
}

// parseSignal accepts "HUP", "SIGHUP", "hup" and "1".
func parseSignal(name string) (unix.Signal, error) {
	const last = 64
	if n, err := strconv.Atoi(name); err == nil && n >= 1 && n <= last {
		return unix.Signal(n), nil
	}
	upper := strings.ToUpper(name)
	if signal := unix.SignalNum("SIG" + strings.TrimPrefix(upper, "SIG")); signal != 0 {
		return signal, nil
	}
	return 0, fmt.Errorf("--signal %q: want a name such as HUP, or a number from 1 to %d", name, last)
}

func killRef(ctx context.Context, c *client.Client, ref string, signal unix.Signal) error {
	container, pod, err := c.Find(ctx, ref)
	if err != nil {
		return err
	}
	if pod == nil {
		return killContainer(ctx, c, container, signal)
	}
	all, err := c.ContainersOf(ctx, pod.GetId())
	if err != nil {
		return err
	}
	killed := 0
	for _, container := range all {
		if container.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			if err := killContainer(ctx, c, container, signal); err != nil {
				return err
			}
			killed++
		}
	}
	if killed == 0 {
		return fmt.Errorf("pod %s has no running container", ref)
	}
	return nil
}

func killContainer(ctx context.Context, c *client.Client, container *runtimeapi.Container, signal unix.Signal) error {
	if signal == unix.SIGKILL {
		if err := checkRunning(ctx, c, container); err != nil {
			return err
		}
		return c.Stop(ctx, container.GetId(), 0)
	}
	p, err := openProcess(ctx, c, container)
	if err != nil {
		return err
	}
	defer p.close()
	if err := pidfd.Signal(p.file, signal); err != nil {
		return fmt.Errorf("send %s to container %s: %w", unix.SignalName(signal), p.container, err)
	}
	return nil
}
