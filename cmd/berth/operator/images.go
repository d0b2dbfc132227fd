package operator

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

func imagesCommand(o *connection) *cobra.Command {
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
		if rows, err = imageFilters.apply(rows, l.filters); err != nil {
			return err
		}
		return printList(cmd.OutOrStdout(), l, rows, imageHeader, imageWide)
	})
	return cmd
}

// imageRow is the JSON form of an image, and a row of images.
type imageRow struct {
	ID      string   `json:"id"`
	Tags    []string `json:"tags"`
	Digests []string `json:"digests"`
	Size    uint64   `json:"size"` // bytes
	Pinned  bool     `json:"pinned"`
}

var (
	imageHeader = []string{"IMAGE", "ID", "SIZE"}
	imageWide   = []string{"DIGEST", "PINNED"}
)

var imageFilters = filters[imageRow]{
	"id":        byPrefix(func(r imageRow) string { return r.ID }),
	"reference": byPattern(func(r imageRow) string { return r.name() }),
	"pinned":    byWord(func(r imageRow) string { return strconv.FormatBool(r.Pinned) }),
	"dangling":  byWord(func(r imageRow) string { return strconv.FormatBool(len(r.Tags) == 0) }),
}

func (r imageRow) fullID() string { return r.ID }

func (r imageRow) cells(l *listFlags) []terminal.Cell {
	digest := "<none>"
	if len(r.Digests) > 0 {
		_, digest, _ = strings.Cut(r.Digests[0], "@")
	}
	return cells(r.name(), l.id(r.ID), terminal.Bytes(r.Size), digest, strconv.FormatBool(r.Pinned))
}

// name returns the name of an image: its tags, else its first digest.
func (r imageRow) name() string {
	switch {
	case len(r.Tags) > 0:
		return strings.Join(r.Tags, ", ")
	case len(r.Digests) > 0:
		return r.Digests[0]
	}
	return "<none>"
}

func imageRows(ctx context.Context, c *client.Client) ([]imageRow, error) {
	reply, err := c.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	rows := make([]imageRow, 0, len(reply.GetImages()))
	for _, image := range reply.GetImages() {
		rows = append(rows, imageRow{
			ID: image.GetId(), Tags: orEmpty(image.GetRepoTags()), Digests: orEmpty(image.GetRepoDigests()),
			Size: image.GetSize(), Pinned: image.GetPinned(),
		})
	}
	slices.SortFunc(rows, func(a, b imageRow) int {
		return cmp.Or(cmp.Compare(a.name(), b.name()), cmp.Compare(a.ID, b.ID))
	})
	return rows, nil
}

// orEmpty replaces nil by an empty list, so that JSON has an array.
func orEmpty(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
