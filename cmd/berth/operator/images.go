package operator

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

func imagesCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List images",
		Args:  cli.NoArgs,
	}
	l := addListFlags(cmd, imageFilters.keys())
	cmd.RunE = o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		rows, err := imageRows(cmd.Context(), c)
		if err != nil {
			return err
		}
		if l.isTable() {
			rows = perTag(rows)
		}
		if rows, err = imageFilters.apply(rows, l.filters); err != nil {
			return err
		}
		return printList(cmd.OutOrStdout(), l, rows, imageHeader, imageWide)
	})
	return cmd
}

// imageRow is a row of images.
type imageRow struct{ client.Image }

var (
	imageHeader = []string{"IMAGE", "ID", "SIZE"}
	imageWide   = []string{"DIGEST", "PINNED", "KIND"}
)

var imageFilters = filters[imageRow]{
	"id":        byPrefix(func(r imageRow) string { return r.ID }),
	"reference": byPatternOfAny(imageRow.names),
	"pinned":    byWord(func(r imageRow) string { return strconv.FormatBool(r.Pinned) }),
	"dangling":  byWord(func(r imageRow) string { return strconv.FormatBool(len(r.Tags) == 0) }),
}

// names returns the tags, or what stands for them in the table.
func (r imageRow) names() []string {
	if len(r.Tags) == 0 {
		return []string{r.Name()}
	}
	return r.Tags
}

func (r imageRow) fullID() string { return r.ID }

func (r imageRow) cells(l *listFlags) []terminal.Cell {
	digest := "<none>"
	if len(r.Digests) > 0 {
		_, digest, _ = strings.Cut(r.Digests[0], "@")
	}
	kind := "image"
	if r.ArtifactType != "" {
		kind = "artifact"
	}
	size := terminal.Bytes(r.Size)
	if r.Fetched != "" {
		size += " (" + r.Fetched + " fetched)"
	}
	return cells(r.Name(), l.id(r.ID), size, digest, strconv.FormatBool(r.Pinned), kind)
}

// perTag returns one row per tag, which are the lines of the table, as with docker and crictl.
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

// orEmpty replaces nil by an empty list, so that JSON has an array.
func orEmpty(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
