// Command man writes the man pages of berthd, and of berth with its subcommands, into a directory,
// and the shell completions of berth into another. contrib/package runs it, because it cannot run
// programs for another architecture. The date in the pages is SOURCE_DATE_EPOCH.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"berth/cmd/berth/commands"
	"berth/cmd/berthd/daemon"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: man MAN-DIRECTORY COMPLETION-DIRECTORY")
		os.Exit(2)
	}
	if err := errors.Join(manPages(os.Args[1]), completions(os.Args[2])); err != nil {
		fmt.Fprintln(os.Stderr, "man:", err)
		os.Exit(1)
	}
}

func manPages(dir string) error {
	for _, program := range []*cobra.Command{commands.Root(), berthd()} {
		program.DisableAutoGenTag = true // the tag contains the time of the build
		header := &doc.GenManHeader{Section: "8", Source: "berth", Manual: "System administration"}
		if err := doc.GenManTree(program, header, dir); err != nil {
			return fmt.Errorf("write man pages of %s: %w", program.Name(), err)
		}
	}
	return nil
}

func completions(dir string) error {
	root := commands.Root()
	return errors.Join(
		root.GenBashCompletionFileV2(filepath.Join(dir, "berth.bash"), true),
		root.GenZshCompletionFile(filepath.Join(dir, "_berth")),
		root.GenFishCompletionFile(filepath.Join(dir, "berth.fish"), true),
	)
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
