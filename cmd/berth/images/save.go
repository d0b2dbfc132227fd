package images

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/moby/term"
	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/internal/cleanup"
	"berth/server/admin"
)

func saveCommand(o *connection) *cobra.Command {
	var req admin.SaveRequest
	var output string
	cmd := &cobra.Command{
		Use: "save REF…", Short: "Save images to an archive", Args: cli.Args(1, 0, "name an image"),
		ValidArgsFunction: o.CompleteImages,
		Long: `Save images to an archive, which goes to standard output or to a file.

The format oci is an OCI layout that docker can load, too. The format docker is that of docker save
before version 25. A tag in REF becomes a name in the archive; an ID or a digest gives no name.

berth keeps no compressed layers. The archive contains them uncompressed. Images keep their IDs. The
digests of their manifests change. Images of an earlier berth must be removed and pulled again first.`,
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "file to write; it appears when it is complete")
	cmd.Flags().StringVar(&req.Format, "format", "oci", "format of the archive: oci or docker")
	cmd.RunE = o.connected(func(c *call) error {
		req.Images = c.args
		save := func(to io.Writer) error { return c.Save(c.Context(), to, req) }
		if output != "" && output != "-" {
			return writeWhole(output, save)
		}
		out := c.OutOrStdout()
		if f, ok := out.(*os.File); ok && term.IsTerminal(f.Fd()) {
			return errors.New("name a file, or redirect standard output: berth image save -o FILE REF")
		}
		return save(out)
	})
	return cmd
}

// writeWhole replaces a file after write has succeeded. It writes to a pipe or device directly.
func writeWhole(path string, write func(io.Writer) error) (err error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return errors.Join(write(f), f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("remove "+f.Name(), func() error { return os.Remove(f.Name()) })
	if err := errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	undo.Release()
	return nil
}
