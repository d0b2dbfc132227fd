// Command berth-stream has the sessions of exec, attach and port-forward, so that they outlive the
// daemon. The daemon starts it.
package main

import (
	"os"

	"berth/server/sessions/process"
)

func main() { os.Exit(process.Main(os.Stderr)) }
