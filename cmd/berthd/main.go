// Command berthd is the daemon: it serves CRI on a unix socket. The unit berth.service runs it.
// The commands that a person types are in the program berth.
package main

import (
	"context"
	"os"

	"berth/cmd/berthd/daemon"
)

func main() {
	os.Exit(daemon.Main(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}
