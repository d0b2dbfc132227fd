package images

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/server/admin"
)

// find returns an image with its configuration.
func find(ctx context.Context, c *client.Client, ref string) (*runtimeapi.Image, ocispec.Image, error) {
	var info struct {
		Config ocispec.Image `json:"imageSpec"`
	}
	req := &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: ref}, Verbose: true}
	reply, err := c.ImageStatus(ctx, req)
	switch {
	case err != nil:
		return nil, info.Config, client.Explain("image "+ref, err)
	case reply.GetImage() == nil:
		return nil, info.Config, fmt.Errorf("image %s: not found", ref)
	}
	if text := reply.GetInfo()["info"]; text != "" {
		if err := json.Unmarshal([]byte(text), &info); err != nil {
			return nil, info.Config, fmt.Errorf("image %s: decode configuration: %w", ref, err)
		}
	}
	return reply.GetImage(), info.Config, nil
}

func historyCommand(o *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use: "history REF", Short: "List the build steps of an image, newest first",
		Args: cli.Args(1, 1, "name an image"), ValidArgsFunction: o.CompleteImages,
	}
	out := cli.AddOutput(cmd, "table")
	cmd.RunE = o.connected(func(c *call) error {
		img, config, err := find(c.Context(), c.Client, c.args[0])
		if err != nil {
			return err
		}
		if out.JSON() {
			return cli.PrintJSON(c.OutOrStdout(), append([]ocispec.History{}, config.History...))
		}
		sizes := layerSizes(c, img.GetId())
		var rows [][]cli.Cell
		for _, h := range config.History {
			created, size := "", ""
			if h.Created != nil && !h.Created.IsZero() { // reproducible builds omit the time, or set the year 1
				created = cli.Age(time.Now(), *h.Created)
			}
			if !h.EmptyLayer && len(sizes) > 0 {
				size, sizes = cli.Bytes(sizes[0].Bytes), sizes[1:]
			}
			rows = append(rows, cli.Cells(created, size, shorten(cmp.Or(h.CreatedBy, h.Comment))))
		}
		slices.Reverse(rows)
		return cli.Table(c.OutOrStdout(), append([][]cli.Cell{cli.Cells("AGE", "SIZE", "STEP")}, rows...))
	})
	return cmd
}

// layerSizes returns the layers of an image, or none if the runtime does not report them.
func layerSizes(c *call, id string) []admin.Layer {
	all, err := c.ImageLayers(c.Context())
	if err != nil {
		return nil
	}
	for _, img := range all {
		if img.ID == id {
			return img.Layers
		}
	}
	return nil
}

// shorten makes the command of a build step fit a line.
func shorten(text string) string {
	const most = 100
	runes := []rune(strings.Join(strings.Fields(text), " "))
	if len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return string(runes)
}

func duCommand(o *connection) *cobra.Command {
	cmd := &cobra.Command{
		Use: "du", Short: "Show the disk usage of images and the part they share", Args: cli.NoArgs,
		Long: `Show the disk usage of images. UNIQUE is what the removal of this one image frees,
SHARED belongs to layers that other images use as well. Partial layers are those of failed and
current pulls. The next pull uses them; "berth image prune" removes those of failed pulls. Indexes of
blobs are kept when images are removed, for the next pull of a blob, see lazy.index_bytes.`,
	}
	out := cli.AddOutput(cmd, "table")
	cmd.RunE = o.connected(func(c *call) error {
		images, err := c.ImageLayers(c.Context())
		if err != nil {
			return err
		}
		usage := usageOf(images)
		if usage.Partial, err = c.PartialLayers(c.Context()); err != nil {
			return err
		}
		if usage.Partial != nil {
			usage.Total += usage.Partial.Bytes
		}
		if usage.Indexes, err = c.Indexes(c.Context()); err != nil {
			return err
		}
		if out.JSON() {
			return cli.PrintJSON(c.OutOrStdout(), usage)
		}
		rows := [][]cli.Cell{cli.Cells("IMAGE", "UNIQUE", "SHARED", "SUM")}
		for _, u := range usage.Images {
			rows = append(rows, cli.Cells(cmp.Or(strings.Join(u.Tags, ", "), client.ShortID(u.ID)), cli.Bytes(u.Unique),
				cli.Bytes(u.Shared), cli.Bytes(u.Unique+u.Shared)))
		}
		if p := usage.Partial; p != nil && p.Layers() > 0 {
			rows = append(rows, cli.Cells(fmt.Sprintf("partial layers (%d)", p.Layers()), "", "", cli.Bytes(p.Bytes)))
		}
		if usage.Indexes.Count > 0 {
			rows = append(rows, cli.Cells("indexes of blobs", "", "", cli.Bytes(usage.Indexes.Bytes)))
		}
		rows = append(rows, cli.Cells("total", "", "", cli.Bytes(usage.Total+usage.Indexes.Bytes)))
		return cli.Table(c.OutOrStdout(), rows)
	})
	return cmd
}

// usage is the disk usage of all images.
type usage struct {
	Images []imageUsage `json:"images"`
	Total  uint64       `json:"total"` // bytes of images and partial layers; shared layers count once
	// Partial are the layers of failed and current pulls; nil: the daemon is older and keeps none.
	Partial *admin.Partial `json:"partial,omitempty"`

	Indexes admin.Indexes `json:"indexes"`
}

type imageUsage struct {
	ID     string   `json:"id"`
	Tags   []string `json:"tags"`
	Unique uint64   `json:"unique"` // bytes
	Shared uint64   `json:"shared"` // bytes
}

func usageOf(images []admin.ImageLayers) usage {
	users, sizes := map[string]int{}, map[string]uint64{}
	for _, img := range images {
		for name, bytes := range distinct(img.Layers) {
			users[name]++
			sizes[name] = bytes
		}
	}
	sum := usage{Images: []imageUsage{}}
	for _, bytes := range sizes {
		sum.Total += bytes
	}
	for _, img := range images {
		u := imageUsage{ID: img.ID, Tags: img.Tags}
		for name, bytes := range distinct(img.Layers) {
			if users[name] > 1 {
				u.Shared += bytes
			} else {
				u.Unique += bytes
			}
		}
		sum.Images = append(sum.Images, u)
	}
	return sum
}

// distinct returns the sizes of layers by name, because an image may contain a layer twice.
func distinct(layers []admin.Layer) map[string]uint64 {
	sizes := map[string]uint64{}
	for _, l := range layers {
		sizes[l.Name] = l.Bytes
	}
	return sizes
}
