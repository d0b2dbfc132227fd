package archive_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/archive"
	"berth/image/registry"
)

// An image is written to an archive and read from it again.
func Example() {
	layer := []byte("a tar")
	node := ocispec.Platform{OS: "linux", Architecture: "amd64"}
	config, err := json.Marshal(ocispec.Image{
		Platform: node,
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(layer)}},
	})
	if err != nil {
		log.Fatal(err)
	}
	name, err := registry.ParseReference("registry.example/shop/web:1.0")
	if err != nil {
		log.Fatal(err)
	}

	var file bytes.Buffer
	err = archive.Write(&file, archive.OCI, []archive.Saved{{
		Config: config,
		Names:  []registry.Reference{name},
		Layers: []archive.SavedLayer{{
			Digest: digest.FromBytes(layer),
			Size:   int64(len(layer)),
			Open:   func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil },
		}},
	}})
	if err != nil {
		log.Fatal(err)
	}

	opened, err := archive.OpenTar(bytes.NewReader(file.Bytes()), int64(file.Len()))
	if err != nil {
		log.Fatal(err)
	}
	images, _, err := opened.Images(node)
	if err != nil {
		log.Fatal(err)
	}
	for _, image := range images {
		blob, err := opened.Blob(image.Layers[0].Blob)
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
		fmt.Printf("%v: %s\n", image.Names, content)
	}
	// Output: [registry.example/shop/web:1.0]: a tar
}
