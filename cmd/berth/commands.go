package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"berth/cmd/berth/client"
)

// operator holds what the operator commands share: they are clients of a
// running daemon, or of any other CRI runtime.
type operator struct{ socket string }

// addOperatorCommands adds the commands that talk to a daemon to root.
func addOperatorCommands(root *cobra.Command) {
	o := &operator{}
	for _, cmd := range []*cobra.Command{
		runCommand(o), psCommand(o), logsCommand(o), execCommand(o), attachCommand(o), portForwardCommand(o), stopCommand(o), rmCommand(o),
		imagesCommand(o), pullCommand(o), traceCommand(o),
	} {
		cmd.Flags().StringVarP(&o.socket, "socket", "s", defaultSocket(), "the runtime's CRI socket (environment: BERTH_SOCKET)")
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		root.AddCommand(cmd)
	}
}

func defaultSocket() string {
	if s := os.Getenv("BERTH_SOCKET"); s != "" {
		return s
	}
	return client.DefaultSocket
}

// connected makes a command's body from a function that needs a connection.
func (o *operator) connected(run func(cmd *cobra.Command, args []string, c *client.Client) error) func(*cobra.Command, []string) error {
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

// exitStatus is an error that makes berth exit with a given code. Without a
// cause nothing is printed: the container has said what there is to say.
type exitStatus struct {
	code  int
	cause error
}

func (e *exitStatus) Error() string {
	if e.cause == nil {
		return fmt.Sprintf("exit status %d", e.code)
	}
	return e.cause.Error()
}

func (e *exitStatus) Unwrap() error { return e.cause }

// exitCode prints a command's error, if it is one to print, and returns the code
// that berth exits with: 1 unless the error says otherwise.
func exitCode(err error, stderr io.Writer) int {
	if err == nil {
		return 0
	}
	var status *exitStatus
	known := errors.As(err, &status)
	if !known || status.cause != nil {
		fmt.Fprintln(stderr, "berth:", err)
	}
	if known {
		return status.code
	}
	return 1
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
	cmd.Flags().VarP(&o, "output", "o", "how to print")
	return &o
}

// row is one line of a table, which knows its cells.
type row interface{ cells() []string }

// printRows prints rows as a table under a header line, or as a JSON array.
func printRows[R row](w io.Writer, how output, header []string, rows []R) error {
	if how == outputJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		if rows == nil {
			rows = []R{} // an array also when it is empty
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

// printCells writes into the tabwriter's buffer, whose errors come from Flush.
func printCells(w io.Writer, cells []string) {
	for i, cell := range cells {
		if i > 0 {
			_, _ = io.WriteString(w, "\t")
		}
		_, _ = io.WriteString(w, cell)
	}
	_, _ = io.WriteString(w, "\n")
}
