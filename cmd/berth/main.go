// Command berth is the container runtime: "berth serve" is the daemon, the other
// subcommands are for operators and talk to it over CRI.
package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"
)

func main() {
	os.Exit(exitCode(newRootCommand().ExecuteContext(context.Background()), os.Stderr))
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "berth",
		Short:         "A container runtime for Kubernetes nodes",
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newServeCommand(), newConfigCommand(), newCheckCommand())
	addOperatorCommands(root)
	return root
}
