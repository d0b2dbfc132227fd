// Command berth-unpack makes files of one layer's blob, in a process that can do nothing else.
// It is started by the daemon and is of no use by hand; see package worker.
package main

import (
	"os"

	"berth/image/unpack/worker"
)

func main() { os.Exit(worker.Main(os.Args[1:])) }
