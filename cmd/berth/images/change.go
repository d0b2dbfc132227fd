package images

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/moby/term"
	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/server/admin"
)

func loadCommand(o *connection) *cobra.Command {
	var req admin.LoadRequest
	var input string
	cmd := &cobra.Command{
		Use:   "load [PATH…]",
		Short: "Load images from OCI layouts or docker archives",
		Long: `Load images from OCI layouts or docker archives.

PATH is an archive or the directory of an OCI layout. Without PATH, or with "-", the archive comes
from standard input. Archives may be compressed with gzip or zstd. The names of the images come
from the archive; --name replaces them. Entries that are no image of this node, such as signatures
and attestations, are skipped and named.`,
	}
	cmd.Flags().StringVarP(&input, "input", "i", "", "the same as PATH, as with docker load")
	cmd.Flags().StringVar(&req.Name, "name", "", "name of the only image in the archive")
	cmd.Flags().BoolVar(&req.Pin, "pin", false, "exclude the images from kubelet's garbage collection")
	cmd.RunE = o.connected(func(c *call) error {
		paths := c.args
		if input != "" {
			paths = append([]string{input}, paths...)
		}
		if len(paths) == 0 {
			paths = []string{"-"}
		}
		for _, path := range paths {
			if err := c.load(path, req); err != nil {
				return err
			}
		}
		return nil
	})
	return cmd
}

// load sends one archive and prints its images.
func (c *call) load(path string, req admin.LoadRequest) error {
	from, err := openArchive(path, c.InOrStdin())
	if err != nil {
		return err
	}
	defer from.Close() // read only
	return c.send(path, from, req)
}

// send sends an archive and prints its images, and what was skipped to standard error.
func (c *call) send(path string, from io.Reader, req admin.LoadRequest) error {
	images, skipped, err := c.Load(c.Context(), from, req)
	if err != nil {
		return fmt.Errorf("load %s: %w", path, err)
	}
	for _, entry := range skipped {
		if _, err := fmt.Fprintln(c.ErrOrStderr(), "skipped", entry); err != nil {
			return err
		}
	}
	for _, img := range images {
		if _, err := fmt.Fprintln(c.OutOrStdout(), img.ID, strings.Join(img.Tags, " ")); err != nil {
			return err
		}
	}
	return nil
}

// openArchive opens an archive. It packs a directory into a tar.
func openArchive(path string, stdin io.Reader) (io.ReadCloser, error) {
	if path == "-" {
		if f, ok := stdin.(*os.File); ok && term.IsTerminal(f.Fd()) {
			return nil, errors.New("name an archive, or connect standard input to one: berth image load PATH")
		}
		return io.NopCloser(stdin), nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return os.Open(path)
	}
	out, in := io.Pipe()
	go func() {
		w := tar.NewWriter(in)
		err := w.AddFS(os.DirFS(path))
		_ = in.CloseWithError(errors.Join(err, w.Close())) // it always returns nil
	}()
	return out, nil
}

func tagCommand(o *connection) *cobra.Command {
	return &cobra.Command{
		Use: "tag REF NAME", Short: "Give an image another name",
		Args: cli.Args(2, 2, "name an image and its new name"), ValidArgsFunction: o.CompleteImages,
		RunE: o.connected(func(c *call) error {
			_, err := c.Tag(c.Context(), c.args[0], c.args[1])
			return err
		}),
	}
}

func rmCommand(o *connection) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm REF…", Short: "Remove images, or one of their names", Args: cli.Args(1, 0, "name an image"),
		Long: `Remove images. If REF is one of several names of an image, only that name is removed.
An ID, a name with a digest or the last name removes the image with all of its names. Removed names
are printed on standard error. Without --force, an image with several names is not removed by its ID
or digest, and an image that a container uses is not removed. Containers keep running.`,
		ValidArgsFunction: o.CompleteImages,
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "remove the image with all its names, also if containers use it")
	cmd.RunE = o.connected(func(c *call) error {
		for _, ref := range c.args {
			if err := c.remove(ref, force); err != nil {
				return err
			}
		}
		return nil
	})
	return cmd
}

func (c *call) remove(ref string, force bool) error {
	img, _, err := find(c.Context(), c.Client, ref)
	if err != nil {
		return err
	}
	byName := !strings.HasPrefix(strings.TrimPrefix(img.GetId(), "sha256:"), strings.TrimPrefix(ref, "sha256:"))
	if byName && !strings.Contains(ref, "@") && len(img.GetRepoTags()) > 1 {
		_, err := c.Untag(c.Context(), ref)
		return errors.Join(err, c.untagged(err, ref))
	}
	if !force {
		if err := c.checkUnused(img, ref); err != nil {
			return err
		}
	}
	err = c.removeID(img.GetId())
	return errors.Join(err, c.untagged(err, img.GetRepoTags()...))
}

// untagged prints names that were removed, unless there was an error.
func (c *call) untagged(err error, names ...string) error {
	if err != nil || len(names) == 0 {
		return nil
	}
	_, err = fmt.Fprintln(c.ErrOrStderr(), "untagged", strings.Join(names, " "))
	return err
}

// checkUnused refuses the removal of an image that has several names, or that a container uses.
func (c *call) checkUnused(img *runtimeapi.Image, ref string) error {
	if tags := img.GetRepoTags(); len(tags) > 1 {
		return fmt.Errorf("image %s has several names: remove one of %s, or use --force", ref, strings.Join(tags, ", "))
	}
	used, err := imagesInUse(c.Context(), c.Client)
	if err != nil {
		return err
	}
	if user := used[img.GetId()]; user != "" {
		return fmt.Errorf("image %s is in use by container %s: remove the container, or use --force", ref, user)
	}
	return nil
}

func (c *call) removeID(id string) error {
	_, err := c.RemoveImage(c.Context(), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: id}})
	if err != nil {
		return client.Explain("remove image "+id, err)
	}
	_, err = fmt.Fprintln(c.OutOrStdout(), id)
	return err
}

func pruneCommand(o *connection) *cobra.Command {
	var all, dry, indexes bool
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove partial layers and images without a name, or all unused images", Args: cli.NoArgs,
		Long: `Remove the partial layers of failed pulls, and images without a name. With --all, remove all
images that no container uses. Pinned images stay. kubelet pulls an image again when a pod needs it.`,
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also remove images with names that no container uses")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only print the IDs of the images")
	cmd.Flags().BoolVar(&indexes, "indexes", false, "also remove the indexes of blobs, see lazy.index_bytes")
	cmd.RunE = o.connected(func(c *call) error {
		images, err := c.AllImages(c.Context())
		if err != nil {
			return err
		}
		used, err := imagesInUse(c.Context(), c.Client)
		if err != nil {
			return err
		}
		partial, err := c.prunePartial(dry) // before the images, because the removal of an image also removes partial layers
		if err != nil {
			return err
		}
		var count int
		var freed uint64
		for _, img := range images {
			if img.Pinned || used[img.ID] != "" || !all && len(img.Tags)+len(img.Digests) > 0 {
				continue
			}
			count++
			freed += img.Size
			if dry {
				_, err = fmt.Fprintln(c.OutOrStdout(), img.ID)
			} else {
				err = c.removeID(img.ID)
			}
			if err != nil {
				return err
			}
		}
		if err := c.pruned(partial, count, freed, dry); err != nil || !indexes {
			return err
		}
		return c.pruneIndexes(dry)
	})
	return cmd
}

// prunePartial removes the partial layers and returns them, or only returns them. The result is nil
// if the runtime keeps no partial layers.
func (c *call) prunePartial(dry bool) (*admin.Partial, error) {
	if dry {
		return c.PartialLayers(c.Context())
	}
	return c.RemovePartialLayers(c.Context())
}

// pruned prints what was removed, or what would be removed.
func (c *call) pruned(partial *admin.Partial, images int, freed uint64, dry bool) error {
	removed := "removed"
	if dry {
		removed = "would be removed"
	}
	if partial != nil && partial.Layers() > 0 {
		_, err := fmt.Fprintf(c.ErrOrStderr(), "%d partial layers %s, %s\n",
			partial.Layers(), removed, cli.Bytes(partial.Bytes))
		if err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(c.ErrOrStderr(), "%d images %s, layers of up to %s\n", images, removed, cli.Bytes(freed))
	return err
}

// pruneIndexes removes the indexes of blobs.
func (c *call) pruneIndexes(dry bool) error {
	count, removed := c.DropIndexes, "removed"
	if dry {
		count, removed = c.Indexes, "would be removed"
	}
	gone, err := count(c.Context())
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(c.ErrOrStderr(), gone.Count, "indexes", removed+",", cli.Bytes(gone.Bytes))
	return err
}

// imagesInUse returns the IDs of the images of all containers and their image volumes.
func imagesInUse(ctx context.Context, c *client.Client) (map[string]string, error) {
	containers, err := c.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	used := map[string]string{}
	for _, container := range containers.GetContainers() {
		name := client.ContainerName(container)
		used[container.GetImageId()] = name
		reply, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: container.GetId()})
		if err != nil {
			continue // removed meanwhile
		}
		for _, mount := range reply.GetStatus().GetMounts() {
			if ref := mount.GetImage().GetImage(); ref != "" {
				if img, _, err := find(ctx, c, ref); err == nil {
					used[img.GetId()] = name
				}
			}
		}
	}
	return used, nil
}
