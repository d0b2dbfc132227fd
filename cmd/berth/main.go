// Command berth is the container runtime: "berth serve" is the daemon, the other
// subcommands are for operators and talk to it over CRI.
package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"
)

func main() {
	err := newRootCommand().ExecuteContext(context.Background())
	os.Exit(report(err))
}

// report prints what a command failed with and returns berth's exit code. Commands
// that end as a container did have their own code, and may have nothing to say.
func report(err error) int {
	if err == nil {
		return 0
	}
	var exit *exitStatus
	own := errors.As(err, &exit)
	if !own || !exit.Silent() {
		fmt.Fprintln(os.Stderr, "berth:", err)
	}
	if own {
		return exit.ExitCode()
	}
	return 1
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "berth",
		Short:         "A container runtime for Kubernetes nodes",
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newServeCommand(), newConfigCommand())
	addOperatorCommands(root)
	return root
}
