package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
	"berth/cmd/berth/waterfall"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// foldIdle is the longest idle time that the drawing shows. Between two requests berth is idle, and
// kubelet may take minutes.
const foldIdle = 5 * time.Millisecond

// hideShort is the duration below which a step is counted instead of drawn.
const hideShort = 50 * time.Microsecond

// plainColumns is the width of a drawing if the output is not a terminal.
const plainColumns = 120

func traceCommand(o *connection) *cobra.Command {
	how := drawing("text")
	cmd := &cobra.Command{
		Use:   "trace POD",
		Short: "Show where the time of a pod's start went",
		Long: `Show where the time of a pod's start went: each request of kubelet, and its steps
in berth, as bars, as a picture (--output svg) or as data (--output json). The pod
is given by name, ID or a prefix of the ID.

berth records every start. A daemon started after the pod has no record of it.`,
		Args: cli.Args(1, 1, "name a pod"),
	}
	cmd.Flags().VarP(&how, "output", "o", "output format")
	cmd.ValidArgsFunction = o.completeNames(podNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		pod, err := c.FindPod(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		operations, err := startOf(cmd.Context(), c, pod)
		if err != nil {
			return err
		}
		return printTrace(cmd.OutOrStdout(), how, pod, operations)
	})
	return cmd
}

// drawing is the value of --output.
type drawing string

func (d *drawing) String() string { return string(*d) }
func (d *drawing) Type() string   { return "text|svg|json" }

// Set takes the value from the command line.
func (d *drawing) Set(s string) error {
	switch s {
	case "text", "svg", "json":
		*d = drawing(s)
		return nil
	}
	return fmt.Errorf("want text, svg or json")
}

// startOf asks the daemon for the operations that started a pod.
func startOf(ctx context.Context, c *client.Client, pod *runtimeapi.PodSandbox) ([]trace.Operation, error) {
	reply, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod.GetId(), Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("trace pod %s: %w", client.ShortID(pod.GetId()), err)
	}
	text, found := reply.GetInfo()["trace"]
	if !found {
		return nil, errdefs.FailedPrecondition(
			"the runtime records no traces: it is not berth, or its version is too old")
	}
	var operations []trace.Operation
	if err := json.Unmarshal([]byte(text), &operations); err != nil {
		return nil, fmt.Errorf("trace of pod %s: %w", client.ShortID(pod.GetId()), err)
	}
	if len(operations) == 0 {
		return nil, errdefs.NotFound("pod %s was started by an earlier daemon, whose record of it is lost",
			client.ShortID(pod.GetId()))
	}
	return operations, nil
}

func printTrace(w io.Writer, how drawing, pod *runtimeapi.PodSandbox, operations []trace.Operation) error {
	if how == "json" {
		return printData(w, operations)
	}
	meta := pod.GetMetadata()
	chart := waterfall.Chart{Fold: foldIdle, Hide: hideShort, Spans: spansOf(operations),
		Title: fmt.Sprintf("%s/%s: %s in berth", meta.GetNamespace(), meta.GetName(), waterfall.Took(timeIn(operations)))}
	if how == "svg" {
		return chart.SVG(w)
	}
	columns := plainColumns
	if size, ok := terminal.Size(w); ok {
		columns = int(size.Width)
	}
	return chart.Text(w, columns)
}

// printData prints every span. Names and reasons may come from anywhere, and the output may go to a
// terminal. So printData escapes invisible characters and marks that change the direction of text.
// These occur only in strings, where JSON allows the escapes.
func printData(w io.Writer, operations []trace.Operation) error {
	data, err := json.MarshalIndent(operations, "", "  ")
	if err != nil {
		return err
	}
	var out bytes.Buffer
	for _, r := range string(data) {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			out.WriteRune(r)
		case r > math.MaxUint16:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	out.WriteByte('\n')
	_, err = w.Write(out.Bytes())
	return err
}

// timeIn is the time of all operations together.
func timeIn(operations []trace.Operation) (total time.Duration) {
	for _, o := range operations {
		if len(o.Spans) > 0 {
			total += time.Duration(o.Spans[0].Took)
		}
	}
	return total
}

// spansOf are operations as bars on one axis.
func spansOf(operations []trace.Operation) (all []waterfall.Span) {
	for _, o := range operations {
		for _, s := range o.Spans {
			name := s.Name
			if s.Depth == 0 && o.Object != "" {
				name += " " + o.Object
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
