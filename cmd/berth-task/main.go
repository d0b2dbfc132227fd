// Command berth-task runs containers with shims of containerd's task API ("shim v2"), such as
// Kata's. It has the command line of an OCI runtime (package shim/taskapi). Berth calls it for
// handlers of the type shim.
package main

import (
	"os"

	"berth/shim/taskapi"
)

func main() { os.Exit(taskapi.Main(os.Args[1:])) }
