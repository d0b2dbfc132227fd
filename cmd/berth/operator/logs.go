package operator

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/crilog"
)

func logsCommand(o *Connection) *cobra.Command {
	var follow, stamps, previous bool
	var tail int
	var since string
	cmd := &cobra.Command{
		Use:   "logs CONTAINER|POD",
		Short: "Print a container's log",
		Long: `Print the log of a container, or of a pod's only container, or of the pod's container
that -c names.`,
		Example: "  berth logs -f --tail 10 web/app\n  berth logs default/web -c app --since 10m\n  berth logs -p web/app",
		Args:    cli.Args(1, 1, "name a container or pod"),
	}
	flags := cmd.Flags()
	containerName := o.addContainerFlag(cmd)
	flags.BoolVarP(&follow, "follow", "f", false, "follow the log until the container ends")
	flags.IntVarP(&tail, "tail", "n", crilog.All, "print only the last N lines")
	flags.BoolVarP(&previous, "previous", "p", false, "print the log of the attempt before, which ended")
	flags.StringVar(&since, "since", "", "print only lines since a time (2026-01-02T15:04:05Z) or within a duration (10m)")
	flags.BoolVarP(&stamps, "timestamps", "t", false, "prefix each line with its time")
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		after, err := parseSince(since, time.Now())
		if err != nil {
			return err
		}
		ctx := cmd.Context()
		out := &logPrinter{stdout: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr(), stamps: stamps}
		container, err := findContainer(ctx, c, args[0], *containerName)
		if err == nil && previous {
			container, err = previousOf(ctx, c, container)
		}
		if err != nil {
			return err
		}
		err = printLog(ctx, c, container, crilog.Options{Tail: tail, Since: after, Follow: follow}, out)
		return cli.Silent(cli.InterruptStatus(ctx, err))
	})
	return cmd
}

// printLog prints a container's log. Following ends with the container.
func printLog(ctx context.Context, c *client.Client, container *runtimeapi.Container, o crilog.Options,
	out *logPrinter) error {
	status, err := c.ContainerState(ctx, container.GetId())
	if err != nil {
		return err
	}
	if status.GetLogPath() == "" {
		return fmt.Errorf("container %s has no log", client.ContainerName(container))
	}
	if !o.Follow {
		return crilog.Read(ctx, status.GetLogPath(), o, out.print)
	}
	ended := make(chan struct{})
	failed := make(chan error, 1)
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(ended)
		_, err := c.WaitContainer(ctx, container.GetId())
		failed <- err
	}()
	o.Ended = ended
	err = crilog.Read(ctx, status.GetLogPath(), o, out.print)
	cancel()
	if waitErr := <-failed; err == nil {
		err = waitErr
	}
	return err
}

// parseSince parses a time, or a duration before now.
func parseSince(since string, now time.Time) (time.Time, error) {
	if since == "" {
		return time.Time{}, nil
	}
	if d, err := cli.ParseDuration(since); err == nil {
		return now.Add(-d), nil
	}
	at, err := time.Parse(time.RFC3339Nano, since)
	if err != nil {
		return time.Time{}, fmt.Errorf("--since %q: want a time like 2026-01-02T15:04:05Z or a duration like 10m", since)
	}
	return at, nil
}

// logPrinter writes log lines to the stream that they came from.
type logPrinter struct {
	stdout, stderr io.Writer
	stamps         bool
}

func (p *logPrinter) print(r crilog.Record) error {
	w := p.stdout
	if r.Stream == crilog.Stderr {
		w = p.stderr
	}
	line := make([]byte, 0, len(time.RFC3339Nano)+len(r.Content)+2)
	if p.stamps {
		line = append(r.Time.AppendFormat(line, time.RFC3339Nano), ' ')
	}
	line = append(line, r.Content...)
	if !r.Partial {
		line = append(line, '\n')
	}
	_, err := w.Write(line)
	return err
}
