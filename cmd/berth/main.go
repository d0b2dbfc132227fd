// Command berth is the container runtime: "berth serve" is the daemon, the other subcommands are
// for operators. Under the name berth-net it is a CNI plugin.
package main

import (
	"context"
	"os"
	"path/filepath"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/operator"
	"berth/cmd/berth/root"
	"berth/cni/berthnet"
)

func main() {
	if filepath.Base(os.Args[0]) == berthnet.Type { // a link in a directory of CNI plugins
		berthnet.Main()
		return
	}
	operator.SilenceLibraries() // serve redirects them to its log
	os.Exit(cli.ExitCode(root.Command().ExecuteContext(context.Background()), os.Stderr))
}
