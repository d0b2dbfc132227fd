// Command berth is the program for operators. It asks the daemon, which is the program berthd. Some
// commands work on the node and need no daemon. Under the name berth-net it is a CNI plugin.
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
