package operator

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

// output is the value of an --output flag.
type output struct{ format string }

const (
	outputTable = "table"
	outputJSON  = "json"
)

var outputs = []string{outputTable, outputJSON}

func (o *output) String() string { return o.format }

// Type implements pflag.Value.
func (o *output) Type() string { return strings.Join(outputs, "|") }

// Set takes the value from the command line.
func (o *output) Set(s string) error {
	if !slices.Contains(outputs, s) {
		return fmt.Errorf("want %s", strings.Join(outputs, " or "))
	}
	o.format = s
	return nil
}

// addOutputFlag adds --output. The default is a table.
func addOutputFlag(cmd *cobra.Command) *output {
	o := &output{outputTable}
	cmd.Flags().VarP(o, "output", "o", "output format")
	complete(cmd, "output", outputs...)
	return o
}

// listFlags are the flags that all lists share.
type listFlags struct {
	out     *output
	quiet   bool
	noTrunc bool
}

// addListFlags adds the flags of a list.
func addListFlags(cmd *cobra.Command) *listFlags {
	l := &listFlags{out: addOutputFlag(cmd)}
	cmd.Flags().BoolVarP(&l.quiet, "quiet", "q", false, "print only IDs")
	cmd.Flags().BoolVar(&l.noTrunc, "no-trunc", false, "print full IDs")
	return l
}

// isTable reports whether the list is a table.
func (l *listFlags) isTable() bool { return !l.quiet && l.out.format == outputTable }

// id returns an ID as the list shows it.
func (l *listFlags) id(id string) string {
	if l.noTrunc {
		return id
	}
	return client.ShortID(id)
}

// row is one object of a list.
type row interface {
	fullID() string
	// cells returns the columns of the table.
	cells(l *listFlags) []cli.Cell
}

// cells are texts without colors.
func cells(texts ...string) (row []cli.Cell) {
	for _, text := range texts {
		row = append(row, cli.Cell{Text: text})
	}
	return row
}

// printList prints rows in the chosen form.
func printList[R row](w io.Writer, l *listFlags, rows []R, header ...string) error {
	if l.quiet {
		for _, r := range rows {
			if _, err := fmt.Fprintln(w, l.id(r.fullID())); err != nil {
				return err
			}
		}
		return nil
	}
	if !l.isTable() {
		return printJSON(w, append([]R{}, rows...)) // an empty array, not null
	}
	table := [][]cli.Cell{cells(header...)}
	for _, r := range rows {
		table = append(table, r.cells(l))
	}
	return cli.Table(w, table)
}

// printJSON prints a value as JSON.
func printJSON(w io.Writer, value any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(value)
}
