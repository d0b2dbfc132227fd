// Command berth is the container runtime: "berth serve" is the daemon, the other subcommands are
// for operators. Under the name berth-net it is a CNI plugin.
package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"berth/cmd/berth/check"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/config"
	"berth/cmd/berth/operator"
	"berth/cmd/berth/serve"
	"berth/cni/berthnet"
	"berth/internal/version"
)

func main() {
	if filepath.Base(os.Args[0]) == berthnet.Type { // a link in a directory of CNI plugins
		berthnet.Main()
		return
	}
	operator.SilenceLibraries() // serve redirects them to its log
	os.Exit(cli.ExitCode(newRootCommand().ExecuteContext(context.Background()), os.Stderr))
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "berth",
		Short:         "A container runtime for Kubernetes nodes",
		Version:       version.Full(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(serve.Command(), config.Command(), check.Command())
	root.AddCommand(operator.Commands()...)
	return root
}
