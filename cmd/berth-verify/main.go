// Command berth-verify reads what may come from anyone, in a process that can do nothing else: the
// signatures of one image (package image/trust/worker), or the process images of one checkpoint
// (package checkpoint/confined/worker). The daemon starts it; it has no use on its own.
package main

import (
	"os"
	"slices"

	"berth/checkpoint/confined/wire"
	checkpoint "berth/checkpoint/confined/worker"
	"berth/image/trust/worker"
)

func main() {
	if args := os.Args[1:]; slices.Equal(args, []string{wire.Version}) {
		os.Exit(checkpoint.Main())
	}
	os.Exit(worker.Main(os.Args[1:]))
}
