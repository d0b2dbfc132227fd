package registry_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"berth/image/registry"
)

// serveImage starts a registry on loopback with the image shop/web:1.0, which has one layer, and
// returns its host and port.
func serveImage() (host string, stop func(), err error) {
	server := httptest.NewServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))))
	host = strings.TrimPrefix(server.URL, "http://")
	tag, err := name.ParseReference(host + "/shop/web:1.0")
	if err != nil {
		return "", nil, err
	}
	image, err := mutate.AppendLayers(empty.Image, static.NewLayer([]byte("a layer"), types.OCIUncompressedLayer))
	if err != nil {
		return "", nil, err
	}
	return host, server.Close, remote.Write(tag, image)
}

// A client resolves the image that a reference names, and reads its layers.
func Example() {
	host, stop, err := serveImage()
	if err != nil {
		log.Fatal(err)
	}
	defer stop()

	client, err := registry.NewClient(registry.Config{
		Sources: registry.Sources{Dirs: []string{"/etc/berth/certs.d", "/etc/containerd/certs.d"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	ref, err := registry.ParseReference(host + "/shop/web:1.0")
	if err != nil {
		log.Fatal(err)
	}
	repository, err := client.Open(ref, registry.Credentials{})
	if err != nil {
		log.Fatal(err)
	}
	defer repository.Close()

	ctx := context.Background()
	image, err := repository.Resolve(ctx, registry.DefaultPlatform())
	if err != nil {
		log.Fatal(err)
	}
	for _, layer := range image.Layers {
		blob, err := repository.Blob(ctx, layer.Blob, 0, nil)
		if err != nil {
			log.Fatal(err)
		}
		content, err := io.ReadAll(blob) // fails unless size and digest are right
		if err != nil {
			log.Fatal(err)
		}
		if err := blob.Close(); err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s: %s\n", layer.Blob.MediaType, content)
	}
	// Output: application/vnd.oci.image.layer.v1.tar: a layer
}

// Short names are names of Docker Hub. The tag of a reference with a digest is dropped.
func ExampleParseReference() {
	for _, text := range []string{
		"nginx",
		"registry.example/shop/web:1.0",
		"web:1.0@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
	} {
		ref, err := registry.ParseReference(text)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(ref)
	}
	// Output:
	// docker.io/library/nginx:latest
	// registry.example/shop/web:1.0
	// docker.io/library/web@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
}
