package launcher

import (
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer"

	"berth/shim/launcher/filter"
)

// Init is where libcontainer goes on in a container's first process, and in each that is executed there. It does not return.
func Init() {
	if err := filter.Take(); err != nil {
		fmt.Fprintln(os.Stderr, "berth-shim: seccomp filter:", err)
		os.Exit(1)
	}
	libcontainer.Init()
}
