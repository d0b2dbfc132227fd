// Command berth-shim launches containers for berth. Only the daemon starts it; see package
// shim/launcher.
package main

import (
	"fmt"
	"os"

	_ "github.com/opencontainers/runc/libcontainer/nsenter" // enters namespaces before Go's runtime starts

	"berth/shim/launcher"
	"berth/shim/proto"
)

// init continues libcontainer's work in a container's first process, in which libcontainer executes
// /proc/self/exe with the argument "init".
func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		launcher.Init()
	}
}

// helpers are the tasks for which a launcher runs this program in another namespace, by the first
// argument.
var helpers = map[string]func(args []string) error{
	proto.RaiseLastPID: launcher.RaiseLastPID,
	proto.ReplaceProc:  launcher.ReplaceProc,
}

func main() {
	if len(os.Args) > 1 && helpers[os.Args[1]] != nil {
		if err := helpers[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "berth-shim:", err)
			os.Exit(1)
		}
		return
	}
	settings, err := proto.ParseLauncherArgs(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "berth-shim:", err)
		os.Exit(2)
	}
	os.Exit(launcher.Main(settings))
}
