// Command berth is what a person types: it asks the daemon, which is the program berthd, and works
// on the node without one. Under the name berth-net it is a CNI plugin.
package main

import (
	"context"
	"os"
	"path/filepath"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/commands"
	"berth/cmd/berth/operator"
	"berth/cni/berthnet"
)

func main() {
	if filepath.Base(os.Args[0]) == berthnet.Type { // a link in a directory of CNI plugins
		berthnet.Main()
		return
	}
	operator.SilenceLibraries()
	os.Exit(cli.ExitCode(commands.Root().ExecuteContext(context.Background()), os.Stderr))
}
