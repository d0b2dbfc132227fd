// Package images provides the command `berth image`. Listing, pulling and removing use only CRI and
// work with any runtime, also for security profiles. The other commands need berth's own service
// (package admin).
package images

import (
	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/operator"
)

// connection is the socket that the commands connect to.
type connection struct{ operator.Connection }

// Command returns the command `berth image` with its subcommands.
func Command() *cobra.Command {
	o := &connection{}
	cmd := &cobra.Command{
		Use:   "image",
		Short: "List, load, save, name and remove images",
		Args:  cobra.ArbitraryArgs,
		RunE:  cli.Group,
	}
	o.AddFlag(cmd, cmd.PersistentFlags())
	cmd.AddCommand(operator.ImageCommands(&o.Connection)...)
	cmd.AddCommand(loadCommand(o), saveCommand(o), importCommand(o), tagCommand(o),
		rmCommand(o), pruneCommand(o), historyCommand(o), duCommand(o), profilesCommand(o))
	for _, sub := range cmd.Commands() {
		sub.SilenceUsage, sub.SilenceErrors = true, true
	}
	return cmd
}

// Shortcuts returns subcommands of `berth image` under the names that docker, podman, nerdctl and
// crictl give them. The help does not list them.
func Shortcuts() []*cobra.Command {
	o := &connection{}
	rmi := rmCommand(o)
	rmi.Use = "rmi REF…"
	shortcuts := []*cobra.Command{rmi, loadCommand(o), saveCommand(o), tagCommand(o), historyCommand(o)}
	for _, cmd := range shortcuts {
		o.AddFlag(cmd, cmd.Flags())
		cmd.Hidden, cmd.SilenceUsage, cmd.SilenceErrors = true, true, true
	}
	return shortcuts
}

// connected returns a command's body that connects to the runtime and then calls run.
func (o *connection) connected(run func(*call) error) func(*cobra.Command, []string) error {
	return o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		return run(&call{Client: c, Command: cmd, args: args})
	})
}

// call is one run of a command.
type call struct {
	*client.Client
	*cobra.Command
	args []string
}
