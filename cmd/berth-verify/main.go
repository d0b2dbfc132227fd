// Command berth-verify checks the signatures of one image (package image/trust/worker), in a
// process that can do nothing else. The daemon starts it; it has no use on its own.
package main

import (
	"os"

	"berth/image/trust/worker"
)

func main() { os.Exit(worker.Main()) }
