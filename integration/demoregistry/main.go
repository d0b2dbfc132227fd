// Command demoregistry serves an image built from the host's busybox at
// ADDRESS/library/busybox:latest, so that the demo and the benchmark need no internet. It prints
// the image's full name when it is ready. It ends on SIGTERM or at the end of its standard input.
// With -pull it also serves the image for pull measurements, in gzip and in zstd, and prints these
// names in further lines.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"berth/integration/fixture"
)

func main() {
	address := flag.String("listen", "127.0.0.1:0", "address to listen at")
	pull := flag.Bool("pull", false, "also serve the images for pull measurements")
	flag.Parse()
	if err := serve(*address, *pull); err != nil {
		fmt.Fprintln(os.Stderr, "demoregistry:", err)
		os.Exit(1)
	}
}

func serve(address string, pull bool) error {
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
	names := []string{name}
	if pull {
		more, err := pushPullImages(registry)
		if err != nil {
			return err
		}
		names = append(names, more...)
	}
	fmt.Println(strings.Join(names, "\n"))
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	<-ctx.Done()
	return registry.Close()
}

// pushPullImages pushes the images for pull measurements and returns their names.
func pushPullImages(registry *fixture.Registry) (names []string, err error) {
	for _, form := range []struct {
		name        string
		compression fixture.Compression
	}{{"bench/pull-gzip:latest", fixture.Gzip}, {"bench/pull-zstd:latest", fixture.Zstd}} {
		img, err := fixture.PullImage(form.compression)
		if err != nil {
			return nil, err
		}
		name, err := registry.Push(form.name, img)
		if err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}
