package operator

import (
	"cmp"
	"context"
	"slices"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

func imagesCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List images",
		Args:  cli.NoArgs,
	}
	l := addListFlags(cmd)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		rows, err := imageRows(cmd.Context(), c)
		if err != nil {
			return err
		}
		if l.isTable() {
			rows = perTag(rows)
		}
		return printList(cmd.OutOrStdout(), l, rows, "IMAGE", "ID", "SIZE")
	})
	return cmd
}

// imageRow is a row of images.
type imageRow struct{ client.Image }

func (r imageRow) fullID() string { return r.ID }

func (r imageRow) cells(l *listFlags) []cli.Cell {
	size := cli.Bytes(r.Size)
	if r.Fetched != "" {
		size += " (" + r.Fetched + " fetched)"
	}
	return cli.Cells(r.Name(), l.id(r.ID), size)
}

// perTag returns one row for each tag. docker and crictl show such rows, too.
func perTag(rows []imageRow) (lines []imageRow) {
	for _, r := range rows {
		tags := r.Tags
		if len(tags) == 0 {
			lines = append(lines, r)
		}
		for _, tag := range tags {
			r.Tags = []string{tag}
			lines = append(lines, r)
		}
	}
	slices.SortStableFunc(lines, func(a, b imageRow) int { return cmp.Compare(a.Name(), b.Name()) })
	return lines
}

func imageRows(ctx context.Context, c *client.Client) ([]imageRow, error) {
	images, err := c.AllImages(ctx)
	if err != nil {
		return nil, err
	}
	rows := []imageRow{}
	for _, img := range images {
		rows = append(rows, imageRow{img})
	}
	return rows, nil
}
