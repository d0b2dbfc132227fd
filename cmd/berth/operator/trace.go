package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/waterfall"
	"berth/internal/trace"
	"berth/sandbox/history"
)

// foldIdle is the longest idle time that the drawing shows. Between two requests berth is idle, and
// kubelet may take minutes.
const foldIdle = 5 * time.Millisecond

// hideShort is the duration below which a step is counted instead of drawn.
const hideShort = 50 * time.Microsecond

// plainColumns is the width of a drawing if the output is not a terminal.
const plainColumns = 120

// slowestRows is the number of starts that --slowest lists by default.
const slowestRows = 10

func traceCommand(o *Connection) *cobra.Command {
	var slowest int
	cmd := &cobra.Command{
		Use:   "trace [POD]",
		Short: "Show where the time of a pod's start went",
		Long: fmt.Sprintf(`Show where the time of a pod's start went: each request of kubelet, image pulls, and
their steps in berth, as bars, or as data (--output json). The pod is given by name, ID
or a prefix of the ID.

berth records every start, and keeps the last %d until the daemon ends, also those of
removed pods. Without POD, the command lists them, the newest first. With --slowest[=N]
it lists the N starts that took the longest time.`, history.Kept),
		Example: "  berth trace web\n  berth trace --slowest=5",
	}
	how := cli.AddOutput(cmd, "text")
	cmd.Flags().IntVar(&slowest, "slowest", 0, "list the N slowest starts")
	cmd.Flags().Lookup("slowest").NoOptDefVal = strconv.Itoa(slowestRows)
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if !cmd.Flags().Changed("slowest") {
			return cli.Args(0, 1, "")(cmd, args)
		}
		return slowestArgs(&slowest, args)
	}
	cmd.ValidArgsFunction = o.completeNames(podNames)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		if slowest > 0 || len(args) == 0 {
			return listStarts(cmd.Context(), cmd.OutOrStdout(), c, how, slowest)
		}
		start, err := c.FindStart(cmd.Context(), args[0])
		if err != nil {
			return client.Explain("trace "+args[0], err)
		}
		return printTrace(cmd.OutOrStdout(), how, start)
	})
	return cmd
}

// slowestArgs checks the number of --slowest, which may also be given as an argument.
func slowestArgs(n *int, args []string) error {
	if len(args) == 1 {
		given, err := strconv.Atoi(args[0])
		if err != nil {
			return errors.New("--slowest lists starts of all pods, leave the pod out")
		}
		*n = given
	}
	if *n <= 0 || len(args) > 1 {
		return errors.New("--slowest needs a number above 0: --slowest=5")
	}
	return nil
}

// listStarts lists the kept starts, the newest or the slowest first.
func listStarts(ctx context.Context, w io.Writer, c *client.Client, how *cli.Output, slowest int) error {
	starts, err := c.Starts(ctx)
	if err != nil {
		return client.Explain("list starts", err)
	}
	if slowest > 0 {
		slices.SortStableFunc(starts, func(a, b history.Summary) int { return cmp.Compare(b.Took, a.Took) })
		starts = starts[:min(slowest, len(starts))]
	}
	if how.JSON() {
		return cli.PrintJSON(w, starts)
	}
	table := [][]cli.Cell{cli.Cells("POD", "NAME", "NAMESPACE", "AGE", "CONTAINERS", "TOOK", "PULL", "RESULT")}
	for _, s := range starts {
		table = append(table, startRow(s))
	}
	return cli.Table(w, table)
}

// startRow is a start as a line of the list.
func startRow(s history.Summary) []cli.Cell {
	pull := "-"
	if s.Pull > 0 {
		pull = waterfall.Took(s.Pull)
	}
	row := cli.Cells(client.ShortID(s.ID), s.Name, s.Namespace, cli.Age(time.Now(), s.Began), strconv.Itoa(s.Containers),
		waterfall.Took(s.Took), pull, "ok")
	if s.Failed {
		row[len(row)-1] = cli.Cell{Text: "failed", Color: cli.Red}
	}
	return row
}

func printTrace(w io.Writer, how *cli.Output, start history.Start) error {
	if how.JSON() {
		return cli.PrintJSON(w, start.Operations)
	}
	chart := waterfall.Chart{Fold: foldIdle, Hide: hideShort, Spans: spansOf(start.Operations),
		Title: fmt.Sprintf("%s/%s: %s in berth", start.Namespace, start.Name, waterfall.Took(trace.Busy(start.Operations)))}
	for _, o := range start.Operations {
		chart.Lost += o.Missing
	}
	columns := plainColumns
	if size, ok := cli.Size(w); ok {
		columns = int(size.Width)
	}
	return chart.Text(w, columns)
}

// spansOf returns the bars for operations on one axis.
func spansOf(operations []trace.Operation) (all []waterfall.Span) {
	for _, o := range operations {
		for _, s := range o.Spans {
			name := s.Name
			if subject := cmp.Or(o.Object, o.Image); s.Depth == 0 && subject != "" {
				name += " " + subject
			}
			if s.Open {
				name += " …" // goes on
			}
			began := o.Monotonic - operations[0].Monotonic + s.From
			all = append(
				all,
				waterfall.Span{Name: name, Depth: s.Depth, Start: time.Duration(began), End: time.Duration(began + s.Took),
					Failed: s.Depth == 0 && o.Failure != ""},
			)
		}
	}
	return all
}
