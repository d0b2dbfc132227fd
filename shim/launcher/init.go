package launcher

import (
	"fmt"
	"os"

	"berth/shim/launcher/bpfcache"
)

// Init continues libcontainer in the first process of a container, and of an exec. A package
// initialiser calls it. It does not return.
func Init() {
	if err := restoreSlack(); err != nil {
		fmt.Fprintln(os.Stderr, "berth-shim: timer slack:", err)
		os.Exit(1)
	}
	bpfcache.Init()
}
