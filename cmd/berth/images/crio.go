package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/opencontainers/go-digest"
	"github.com/vbatts/tar-split/tar/asm"
	"github.com/vbatts/tar-split/tar/storage"
	"golang.org/x/sys/unix"
)

// crioImage is an entry of overlay-images/images.json of containers/storage.
type crioImage struct {
	ID    string   `json:"id"` // the digest of the configuration, without "sha256:"
	Names []string `json:"names"`
	Layer string   `json:"layer"` // the topmost
}

// crioLayer is an entry of overlay-layers/layers.json.
type crioLayer struct {
	ID     string        `json:"id"`
	Parent string        `json:"parent"`
	DiffID digest.Digest `json:"diff-digest"`
	Size   int64         `json:"diff-size"` // of the tar
}

// crioImages lists the images of containers/storage with the overlay driver.
func crioImages(dir string) ([]source, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close() // read only
	var images []crioImage
	var layers []crioLayer
	if err := readStorage(root, "overlay-images/images.json", &images); err != nil {
		return nil, err
	}
	if err := readStorage(root, "overlay-layers/layers.json", &layers); err != nil {
		return nil, err
	}
	byID := map[string]crioLayer{}
	for _, l := range layers {
		byID[l.ID] = l
	}
	var found []source
	for _, img := range images {
		if digest.NewDigestFromEncoded(digest.SHA256, img.ID).Validate() != nil {
			continue // an image without a configuration
		}
		write := func(w *tar.Writer) error { return writeCRIO(w, dir, img, byID) }
		found = append(found, source{names: img.Names, write: write})
	}
	return found, nil
}

func readStorage(root *os.Root, name string, v any) error {
	data, err := root.ReadFile(name)
	if err != nil {
		return fmt.Errorf("storage of CRI-O: %w", err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("decode %s: %w", name, err)
	}
	return nil
}

// maxCRIOLayers stops at a loop of parents.
const maxCRIOLayers = 1000

// writeCRIO writes a docker archive of an image. It assembles the tars of its layers from their
// files and tar-split's record of the headers, so the image's ID stays the same.
func writeCRIO(w *tar.Writer, dir string, img crioImage, layers map[string]crioLayer) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close() // read only
	config, err := root.ReadFile("overlay-images/" + img.ID + "/" + bigDataName("sha256:"+img.ID))
	if err != nil {
		return fmt.Errorf("configuration of image %s: %w", img.ID, err)
	}
	var chain []string // bottom first
	for id := img.Layer; id != ""; id = layers[id].Parent {
		l, ok := layers[id]
		if !ok || l.DiffID.Validate() != nil || len(chain) == maxCRIOLayers {
			return fmt.Errorf("image %s: layer %.64q is not in the storage", img.ID, id)
		}
		chain = append([]string{id + ".tar"}, chain...)
		if err := writeCRIOLayer(w, root, l); err != nil {
			return fmt.Errorf("layer %s: %w", l.DiffID, err)
		}
	}
	manifest := []map[string]any{{"Config": "config.json", "RepoTags": img.Names, "Layers": chain}}
	return errors.Join(writeFile(w, "config.json", int64(len(config)), bytes.NewReader(config)),
		writeJSON(w, "manifest.json", manifest))
}

// bigDataName is the name of a file of an image in containers/storage.
func bigDataName(key string) string { return "=" + base64.StdEncoding.EncodeToString([]byte(key)) }

func writeCRIOLayer(w *tar.Writer, root *os.Root, l crioLayer) error {
	f, err := root.Open("overlay-layers/" + l.ID + ".tar-split.gz")
	if err != nil {
		return err
	}
	defer f.Close() // read only
	headers, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	files, err := root.OpenRoot("overlay/" + l.ID + "/diff")
	if err != nil {
		return err
	}
	defer files.Close() // read only
	layer := asm.NewOutputTarStream(layerFiles{files}, storage.NewJSONUnpacker(headers))
	defer layer.Close() // ends its goroutine
	return writeFile(w, l.ID+".tar", l.Size, layer)
}

// layerFiles opens files of a layer. Symlinks of the layer cannot lead out of it.
type layerFiles struct{ root *os.Root }

// Get implements storage.FileGetter. It does not wait for the writer of a FIFO.
func (l layerFiles) Get(name string) (io.ReadCloser, error) {
	return l.root.OpenFile(relative(name), os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// relative makes a tar's name relative to the root of the layer.
func relative(name string) string {
	for len(name) > 1 && name[0] == '/' {
		name = name[1:]
	}
	return name
}
