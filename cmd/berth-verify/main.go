// Command berth-verify verifies the signatures of one image, in a process that can do nothing else.
// The daemon starts it; it has no use on its own. See package worker.
package main

import (
	"os"

	"berth/image/trust/worker"
)

func main() { os.Exit(worker.Main(os.Args[1:])) }
