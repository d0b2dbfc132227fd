// Command demoregistry serves an image built from the host's busybox at
// ADDRESS/library/busybox:latest, so that the demo and the benchmark need no
// internet. It prints the image's full name when it is ready, and ends on SIGTERM
// or when its standard input does.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"berth/integration/fixture"
)

func main() {
	address := flag.String("listen", "127.0.0.1:0", "address to listen at")
	flag.Parse()
	if err := serve(*address); err != nil {
		fmt.Fprintln(os.Stderr, "demoregistry:", err)
		os.Exit(1)
	}
}

func serve(address string) error {
	img, err := fixture.Image(v1.Config{Cmd: []string{"sh"}})
	if err != nil {
		return err
	}
	registry, err := fixture.ListenRegistry(address, nil)
	if err != nil {
		return err
	}
	name, err := registry.Push("library/busybox:latest", img)
	if err != nil {
		return err
	}
	fmt.Println(name)
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	<-ctx.Done()
	return registry.Close()
}
