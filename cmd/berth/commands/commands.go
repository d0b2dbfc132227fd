// Package commands provides the command tree of the program berth, with its commands `serve` and
// `config`. The program runs the tree, and the packages' man pages are generated from it.
package commands

import (
	"strings"

	"github.com/spf13/cobra"

	"berth/cmd/berth/check"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/debug"
	"berth/cmd/berth/images"
	"berth/cmd/berth/operator"
	"berth/cmd/berth/reset"
	"berth/internal/version"
)

// Root returns the command berth with all its subcommands.
func Root() *cobra.Command {
	root := &cobra.Command{
		Use:           "berth",
		Short:         "A container runtime for Kubernetes nodes",
		Version:       version.Full(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.ArbitraryArgs,
		RunE:          cli.Group,
	}
	root.SetFlagErrorFunc(cli.FlagError)
	root.AddCommand(serveCommand(), configCommand(), check.Command(), check.UpgradeCommand(), reset.Command(),
		debug.Command(), images.Command())
	root.AddCommand(images.Shortcuts()...)
	root.AddCommand(operator.Commands()...)
	group(root)
	return root
}

// groups are the commands in the order of the help. A command without a group is listed last.
var groups = []struct{ title, commands string }{
	{"Containers and pods:", "run ps logs exec cp rm checkpoint restore"},
	{"Images and disk:", "images pull image"},
	{"Node:", "check upgrade version trace debug reset"},
	{"Daemon:", "serve config"},
}

func init() { cobra.EnableCommandSorting = false } // of all help texts, so that groups keep their order

// group sorts the commands of the help into groups.
func group(root *cobra.Command) {
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.title, Title: g.title})
		for name := range strings.FieldsSeq(g.commands) {
			if cmd, _, err := root.Find([]string{name}); err == nil && cmd != root {
				cmd.GroupID = g.title
				root.RemoveCommand(cmd)
				root.AddCommand(cmd)
			}
		}
	}
}
