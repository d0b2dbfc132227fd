package operator

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

func pullCommand(o *Connection) *cobra.Command {
	var creds string
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
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print no progress")
	cmd.ValidArgsFunction = o.completeNames(imageNames)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		auth, err := parseCreds(creds)
		if err != nil {
			return err
		}
		show := newProgress(cmd.ErrOrStderr(), time.Now)
		if quiet {
			show.out = io.Discard
		}
		id, err := c.PullWithProgress(cmd.Context(), args[0], auth, show.update)
		if err != nil {
			return err
		}
		show.done()
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
