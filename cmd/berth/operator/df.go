package operator

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
	"berth/internal/errdefs"
)

func dfCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "df",
		Short: "Show the disk space of images and containers",
		Long: `Show how much disk space images, the partial layers of failed pulls and the writable layers of
containers use. Images share layers, so the space of all images is less than the sum of their sizes.`,
		Args: cli.NoArgs,
	}
	out := addOutputFlag(cmd, outputTable, outputJSON, outputYAML, outputTemplate)
	cmd.RunE = o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		rows, err := diskUsage(cmd.Context(), c)
		if err != nil {
			return err
		}
		if out.format != outputTable {
			return printValues(cmd.OutOrStdout(), out, rows)
		}
		table := [][]terminal.Cell{cells("TYPE", "TOTAL", "ACTIVE", "SIZE", "INODES", "PATH")}
		for _, r := range rows {
			table = append(table, cells(r.Type, strconv.Itoa(r.Total), strconv.Itoa(r.Active), terminal.Bytes(r.Bytes),
				strconv.FormatUint(r.Inodes, 10), r.Path))
		}
		return terminal.Table(cmd.OutOrStdout(), table)
	})
	return cmd
}

// diskRow is the disk space of the images, of the partial layers, or of the containers.
type diskRow struct {
	Type   string `json:"type"` // images, partial layers or containers
	Total  int    `json:"total"`
	Active int    `json:"active"` // images that a container uses, or running containers
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
	Path   string `json:"path"` // mount point of the filesystem
}

func diskUsage(ctx context.Context, c *client.Client) ([]diskRow, error) {
	containers, err := containerRows(ctx, c, true)
	if err != nil {
		return nil, err
	}
	images, err := imageRows(ctx, c)
	if err != nil {
		return nil, err
	}
	usage, err := c.ImageFsInfo(ctx, &runtimeapi.ImageFsInfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("disk space of images: %w", err)
	}
	imageSpace, space := diskRow{Type: "images", Total: len(images)}, diskRow{Type: "containers", Total: len(containers)}
	used := map[string]bool{}
	for _, r := range containers {
		used[r.ImageID] = true
		if r.State == "running" {
			space.Active++
		}
	}
	for _, r := range images {
		if used[r.ID] {
			imageSpace.Active++
		}
	}
	for _, fs := range usage.GetImageFilesystems() {
		imageSpace.add(fs)
	}
	partial, err := partialSpace(ctx, c, &imageSpace)
	if err != nil {
		return nil, err
	}
	for _, r := range containers {
		stats, err := c.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: r.ID})
		if err != nil && !errdefs.IsNotFound(err) { // it may have been removed
			return nil, fmt.Errorf("disk space of container %s: %w", client.ShortID(r.ID), err)
		}
		space.add(stats.GetStats().GetWritableLayer())
	}
	if fs := usage.GetContainerFilesystems(); space.Path == "" && len(fs) > 0 {
		space.Path = fs[0].GetFsId().GetMountpoint()
	}
	return append(append([]diskRow{imageSpace}, partial...), space), nil
}

// partialSpace returns a row for the partial layers, if there are any, and subtracts their bytes
// from those of the images, which include them.
func partialSpace(ctx context.Context, c *client.Client, images *diskRow) ([]diskRow, error) {
	partial, err := c.PartialLayers(ctx)
	if err != nil || partial == nil || partial.Layers() == 0 {
		return nil, err
	}
	images.Bytes -= min(partial.Bytes, images.Bytes)
	return []diskRow{{Type: "partial layers", Total: partial.Layers(), Bytes: partial.Bytes, Path: images.Path}}, nil
}

// add adds the usage of a filesystem, which may be unknown.
func (r *diskRow) add(fs *runtimeapi.FilesystemUsage) {
	r.Bytes += fs.GetUsedBytes().GetValue()
	r.Inodes += fs.GetInodesUsed().GetValue()
	if path := fs.GetFsId().GetMountpoint(); path != "" {
		r.Path = path
	}
}
