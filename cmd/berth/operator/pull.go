package operator

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/terminal"
)

func pullCommand(o *connection) *cobra.Command {
	var creds string
	cmd := &cobra.Command{
		Use:   "pull REF",
		Short: "Pull an image",
		Args:  cli.Args(1, 1, "name an image"),
	}
	cmd.Flags().StringVar(&creds, "creds", "", "user:password for the registry (default: the daemon's docker config)")
	cmd.ValidArgsFunction = o.completeNames(imageNames)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		auth, err := parseCreds(creds)
		if err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		show := terminal.NewProgress(cmd.OutOrStdout(), time.Now)
		id, err := c.PullWithProgress(ctx, args[0], auth, show.Update)
		show.Done(err == nil)
		if err != nil {
			return cli.InterruptStatus(ctx, err)
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
		return nil, fmt.Errorf("--creds: want user:password")
	}
	return &runtimeapi.AuthConfig{Username: user, Password: password}, nil
}
