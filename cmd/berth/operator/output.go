package operator

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

// listFlags are the flags that all lists share.
type listFlags struct {
	out     *cli.Output
	quiet   bool
	noTrunc bool
}

// addListFlags adds the flags of a list.
func addListFlags(cmd *cobra.Command) *listFlags {
	l := &listFlags{out: cli.AddOutput(cmd, "table")}
	cmd.Flags().BoolVarP(&l.quiet, "quiet", "q", false, "print only IDs")
	cmd.Flags().BoolVar(&l.noTrunc, "no-trunc", false, "print full IDs")
	return l
}

// isTable reports whether the list is a table.
func (l *listFlags) isTable() bool { return !l.quiet && !l.out.JSON() }

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
		return cli.PrintJSON(w, append([]R{}, rows...)) // an empty array, not null
	}
	table := [][]cli.Cell{cli.Cells(header...)}
	for _, r := range rows {
		table = append(table, r.cells(l))
	}
	return cli.Table(w, table)
}
