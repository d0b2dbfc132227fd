package operator

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

func pullCommand(o *Connection) *cobra.Command {
	var creds, kind string
	var quiet bool
	cmd := &cobra.Command{
		Use:   "pull REF",
		Short: "Pull an image",
		Long: `Pull an image. The image ID goes to standard output, the progress to standard error.

An interrupted or failed pull keeps the layers and bytes that it has received. The next pull fetches
only the rest.`,
		Args: cli.Args(1, 1, "name an image"),
	}
	cmd.Flags().StringVar(&creds, "creds", "", "user:password for the registry (default: those of the runtime's configuration)")
	cmd.Flags().StringVar(&kind, "progress", "auto",
		"auto: a line for each change; json: one object per line on standard output; none")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "the same as --progress=none")
	cli.Complete(cmd, "progress", "auto", "json", "none")
	cmd.ValidArgsFunction = o.completeNames(imageNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		auth, err := parseCreds(creds)
		if err != nil {
			return err
		}
		if quiet {
			kind = "none"
		}
		show, err := newProgress(cmd, kind)
		if err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		id, err := c.PullWithProgress(ctx, args[0], auth, show.update)
		show.done(err == nil)
		switch {
		case err != nil:
			return cli.InterruptStatus(ctx, err)
		case kind == "json":
			return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]string{"id": id})
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
		return err
	})
	return cmd
}

func parseCreds(creds string) (*runtimeapi.AuthConfig, error) {
	if creds == "" {
		return nil, nil
	}
	user, password, ok := strings.Cut(creds, ":")
	if !ok || user == "" {
		return nil, errors.New("--creds: want user:password")
	}
	return &runtimeapi.AuthConfig{Username: user, Password: password}, nil
}

func newProgress(cmd *cobra.Command, kind string) (progress, error) {
	switch kind {
	case "auto":
		return newLines(cmd.ErrOrStderr(), time.Now), nil
	case "json":
		return &jsonProgress{out: json.NewEncoder(cmd.OutOrStdout())}, nil
	case "none":
		return newLines(io.Discard, time.Now), nil
	}
	return nil, fmt.Errorf("--progress: want auto, json or none, not %q", kind)
}

// jsonProgress prints one object per change. The last object of a pull has the image's ID.
type jsonProgress struct {
	out  *json.Encoder
	last []client.Layer
}

// update implements progress.
func (p *jsonProgress) update(layers []client.Layer) {
	if slices.Equal(p.last, layers) {
		return
	}
	p.last = layers
	_ = p.out.Encode(map[string]any{"layers": layers}) // the command's last output reports a broken pipe
}

// done prints the final state of the layers of a successful pull.
func (p *jsonProgress) done(ok bool) {
	if ok {
		p.update(finished(p.last))
	}
}
