// Command berth is the container runtime: "berth serve" is the daemon, the other
// subcommands are for operators and talk to it over CRI. Under the name berth-net it is a CNI plugin.
package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"berth/cni/berthnet"
)

func main() {
	if filepath.Base(os.Args[0]) == berthnet.Type { // a link in a directory of CNI plugins
		berthnet.Main()
		return
	}
	silenceLibraries() // serve has them write to its log
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
