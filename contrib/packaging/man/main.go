// Command man writes the man pages of berthd, and of berth with its subcommands, into a directory.
// contrib/package runs it. The date in the pages is SOURCE_DATE_EPOCH.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"berth/cmd/berth/commands"
	"berth/cmd/berthd/daemon"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: man DIRECTORY")
		os.Exit(2)
	}
	for _, program := range []*cobra.Command{commands.Root(), berthd()} {
		program.DisableAutoGenTag = true // the tag contains the time of the build
		header := &doc.GenManHeader{Section: "8", Source: "berth", Manual: "System administration"}
		if err := doc.GenManTree(program, header, os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, "man:", err)
			os.Exit(1)
		}
	}
}

// berthd describes the daemon, which has no commands.
func berthd() *cobra.Command {
	program := &cobra.Command{
		Use:   daemon.Program,
		Short: "The daemon of the container runtime berth",
		Long:  daemon.Help,
		Run:   func(*cobra.Command, []string) {}, // the page lists the flags of commands that can run
	}
	program.Flags().AddFlagSet(daemon.Flags())
	return program
}
