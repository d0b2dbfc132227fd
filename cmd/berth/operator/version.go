package operator

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/internal/version"
)

func versionCommand(o *Connection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the versions of this program and of the runtime",
		Long: `Show the versions of this program and of the runtime at the socket. The exit code is
1 if no runtime answers. "berth --version" does not connect to a runtime.`,
		Args: cli.NoArgs,
	}
	out := cli.AddOutput(cmd, "table")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		v := versions{Client: programVersion{version.Full(), runtime.Version()}}
		err := o.Connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
			reply, err := c.Version(cmd.Context(), &runtimeapi.VersionRequest{})
			if err != nil {
				return fmt.Errorf("version of the runtime: %w", err)
			}
			v.Runtime = &runtimeVersion{reply.GetRuntimeName(), reply.GetRuntimeVersion(), reply.GetRuntimeApiVersion()}
			return nil
		})(cmd, args)
		if printErr := printVersions(cmd.OutOrStdout(), out, v); printErr != nil {
			return printErr
		}
		return err
	}
	return cmd
}

// versions is the JSON form of version.
type versions struct {
	Client  programVersion  `json:"client"`
	Runtime *runtimeVersion `json:"runtime,omitempty"`
}

type programVersion struct {
	Version string `json:"version"`
	Go      string `json:"go"`
}

type runtimeVersion struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	CRI     string `json:"cri"`
}

func printVersions(w io.Writer, out *cli.Output, v versions) error {
	if out.JSON() {
		return cli.PrintJSON(w, v)
	}
	table := [][]cli.Cell{cli.Cells("Client:", "berth "+v.Client.Version+" ("+v.Client.Go+")")}
	if r := v.Runtime; r != nil {
		table = append(table, cli.Cells("Runtime:", r.Name+" "+r.Version+" (CRI "+r.CRI+")"))
	}
	return cli.Table(w, table)
}
