// Command berth-unpack unpacks the blob of one layer in a confined process. Only the daemon starts
// it; see package worker.
package main

import (
	"os"

	"berth/image/unpack/worker"
)

func main() { os.Exit(worker.Main()) }
