// Package root provides the command tree of the program berth. The program runs it, and the packages'
// man pages are generated from it.
package root

import (
	"github.com/spf13/cobra"

	"berth/cmd/berth/check"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/config"
	"berth/cmd/berth/debug"
	"berth/cmd/berth/images"
	"berth/cmd/berth/operator"
	"berth/cmd/berth/reset"
	"berth/cmd/berth/serve"
	"berth/internal/version"
)

// Command returns the command berth with all its subcommands.
func Command() *cobra.Command {
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
	root.AddCommand(serve.Command(), config.Command(), check.Command(), reset.Command(), debug.Command(),
		images.Command())
	root.AddCommand(operator.Commands()...)
	return root
}
