package launcher

import (
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer"

	"berth/shim/launcher/bpfcache"
	"berth/shim/launcher/sysmon"
)

// Init is where libcontainer goes on in a container's first process, and in each that is executed there. It is called by a package
// initialiser, and does not return.
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
