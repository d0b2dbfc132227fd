// Package operator provides the commands that talk to a daemon, or to another CRI runtime, over its
// socket: run, ps, logs, exec, attach, port-forward, stop, rm, images, pull and trace.
package operator

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"berth/cmd/berth/client"
)

// connection is the socket that all commands of this package connect to.
type connection struct{ socket string }

// Commands returns the commands that talk to a daemon.
func Commands() []*cobra.Command {
	o := &connection{}
	commands := []*cobra.Command{
		runCommand(
			o,
		), psCommand(o), logsCommand(o), execCommand(o), attachCommand(o), portForwardCommand(o),
		stopCommand(o), rmCommand(o),
		imagesCommand(o), pullCommand(o), traceCommand(o),
	}
	for _, cmd := range commands {
		cmd.Flags().
			StringVarP(&o.socket, "socket", "s", defaultSocket(), "CRI socket of the runtime (environment: BERTH_SOCKET)")
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
	}
	return commands
}

// SilenceLibraries drops the messages that libraries such as k8s.io/client-go log through klog to
// standard error, where they would mix with the command's output. The libraries also return these
// errors.
func SilenceLibraries() {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
}

func defaultSocket() string {
	if s := os.Getenv("BERTH_SOCKET"); s != "" {
		return s
	}
	return client.DefaultSocket
}

// connected returns a command's body that connects to the runtime and then calls run.
func (o *connection) connected(
	run func(cmd *cobra.Command, args []string, c *client.Client) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := client.Dial(cmd.Context(), o.socket)
		if err != nil {
			return err
		}
		err = run(cmd, args, c)
		if closeErr := c.Close(); err == nil && closeErr != nil {
			err = fmt.Errorf("close connection to %s: %w", o.socket, closeErr)
		}
		return err
	}
}

// output is the value of an --output flag.
type output string

const (
	outputTable output = "table"
	outputJSON  output = "json"
)

func (o *output) String() string { return string(*o) }
func (o *output) Type() string   { return "table|json" }

// Set takes the value from the command line.
func (o *output) Set(s string) error {
	switch output(s) {
	case outputTable, outputJSON:
		*o = output(s)
		return nil
	}
	return fmt.Errorf("want %s or %s", outputTable, outputJSON)
}

func addOutputFlag(cmd *cobra.Command) *output {
	o := outputTable
	cmd.Flags().VarP(&o, "output", "o", "output format")
	return &o
}

// row is one line of a table.
type row interface{ cells() []string }

// printRows prints rows as a table under a header line, or as a JSON array.
func printRows[R row](w io.Writer, how output, header []string, rows []R) error {
	if how == outputJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		if rows == nil {
			rows = []R{} // an empty array, not null
		}
		return enc.Encode(rows)
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	printCells(table, header)
	for _, r := range rows {
		printCells(table, r.cells())
	}
	return table.Flush()
}

// printCells writes to the tabwriter's buffer, whose errors Flush returns.
func printCells(w io.Writer, cells []string) {
	for i, cell := range cells {
		if i > 0 {
			_, _ = io.WriteString(w, "\t")
		}
		_, _ = io.WriteString(w, cell)
	}
	_, _ = io.WriteString(w, "\n")
}
