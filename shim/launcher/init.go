package launcher

import (
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer"

	"berth/shim/launcher/bpfcache"
	"berth/shim/launcher/sysmon"
)

// Init continues libcontainer in the first process of a container, and of an exec. A package
// initialiser calls it. It does not return.
func Init() {
	if err := sysmon.Restore(); err != nil {
		fail("timer slack", err)
	}
	if err := bpfcache.Receive(); err != nil {
		fail("seccomp filter", err)
	}
	libcontainer.Init()
}

func fail(what string, err error) {
	fmt.Fprintf(os.Stderr, "berth-shim: %s: %v\n", what, err)
	os.Exit(1)
}
