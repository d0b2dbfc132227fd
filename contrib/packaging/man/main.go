// Command man writes the man pages of berth and its subcommands into a directory. contrib/package
// runs it. The date in the pages is SOURCE_DATE_EPOCH.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra/doc"

	"berth/cmd/berth/root"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: man DIRECTORY")
		os.Exit(2)
	}
	command := root.Command()
	command.DisableAutoGenTag = true // the tag contains the time of the build
	header := &doc.GenManHeader{Section: "8", Source: "berth", Manual: "System administration"}
	if err := doc.GenManTree(command, header, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "man:", err)
		os.Exit(1)
	}
}
