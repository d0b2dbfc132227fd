package archive

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/registry"
	"berth/internal/errdefs"
)

// Format is the format of a written archive.
type Format string

const (
	// OCI is an OCI layout with a manifest.json, as Docker 25 and later write it. Readers of both
	// formats understand it.
	OCI Format = "oci"
	// Docker is the format of `docker save` before Docker 25.
	Docker Format = "docker"
)

// Validate returns InvalidArgument for an unknown format.
func (f Format) Validate() error {
	if f != OCI && f != Docker {
		return errdefs.InvalidArgument("unknown archive format %q: want %s or %s", f, OCI, Docker)
	}
	return nil
}

// Saved is an image for [Write].
type Saved struct {
	Config []byte
	Names  []registry.Reference // with a tag
	Layers []SavedLayer         // bottom first
}

// SavedLayer is a layer of a [Saved] image. Its blob is the uncompressed tar.
type SavedLayer struct {
	Digest digest.Digest                 // of the tar; sha256
	Size   int64                         // of the tar
	Open   func() (io.ReadCloser, error) // reads Size bytes and verifies the digest
}

// Write writes the tar of an archive with images. Each layer is written once. Errors of out and of
// the layers' readers are returned.
func Write(out io.Writer, format Format, images []Saved) error {
	if err := format.Validate(); err != nil {
		return err
	}
	w := &writer{tar: tar.NewWriter(out), format: format, written: map[string]bool{}}
	if err := w.documents(images); err != nil {
		return err
	}
	for _, img := range images {
		for _, l := range img.Layers {
			if err := w.layer(l); err != nil {
				return fmt.Errorf("layer %s: %w", l.Digest, err)
			}
		}
	}
	return w.tar.Close()
}

// writer writes one archive.
type writer struct {
	tar     *tar.Writer
	format  Format
	written map[string]bool // names of entries
}

// documents writes everything except the layers. The documents come first, so that a reader of a
// stream knows the images.
func (w *writer) documents(images []Saved) error {
	if w.format == OCI {
		if err := w.layout(images); err != nil {
			return err
		}
	}
	var entries []dockerImage
	for _, img := range images {
		config := digest.FromBytes(img.Config)
		entry := dockerImage{Config: w.path(config, ".json"), RepoTags: []string{}, Layers: []string{}}
		for _, name := range img.Names {
			entry.RepoTags = append(entry.RepoTags, name.String())
		}
		for _, l := range img.Layers {
			entry.Layers = append(entry.Layers, w.path(l.Digest, ".tar"))
		}
		entries = append(entries, entry)
		if err := w.file(entry.Config, img.Config); err != nil {
			return err
		}
	}
	return w.json("manifest.json", entries)
}

// path returns the name of a blob in the archive.
func (w *writer) path(d digest.Digest, extension string) string {
	if w.format == OCI {
		return blobPath(d)
	}
	return d.Encoded() + extension
}

// layout writes the documents of an OCI layout, without the configurations.
func (w *writer) layout(images []Saved) error {
	for _, dir := range []string{"blobs/", "blobs/sha256/"} {
		header := &tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, ModTime: time.Unix(0, 0)}
		if err := w.tar.WriteHeader(header); err != nil {
			return err
		}
	}
	err := w.json(ocispec.ImageLayoutFile, ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion})
	if err != nil {
		return err
	}
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	for _, img := range images {
		entry, err := w.manifest(img)
		if err != nil {
			return err
		}
		for _, name := range img.Names { // an entry has one name
			named := entry
			named.Annotations = map[string]string{nameAnnotation: name.String(), refNameAnnotation: name.Tag}
			index.Manifests = append(index.Manifests, named)
		}
		if len(img.Names) == 0 {
			index.Manifests = append(index.Manifests, entry)
		}
	}
	return w.json(ocispec.ImageIndexFile, index)
}

// manifest writes the manifest of an image and returns its descriptor.
func (w *writer) manifest(img Saved) (ocispec.Descriptor, error) {
	m := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: digest.FromBytes(img.Config),
			Size: int64(len(img.Config))},
		Layers: []ocispec.Descriptor{},
	}
	for _, l := range img.Layers {
		m.Layers = append(m.Layers,
			ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: l.Digest, Size: l.Size})
	}
	data, err := json.Marshal(m)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	var platform ocispec.Platform
	if err := json.Unmarshal(img.Config, &platform); err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("decode configuration: %w", err)
	}
	d := ocispec.Descriptor{MediaType: m.MediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	if platform.OS != "" && platform.Architecture != "" {
		d.Platform = &platform
	}
	return d, w.file(blobPath(d.Digest), data)
}

func (w *writer) json(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.file(name, data)
}

// file writes a file unless it was written before.
func (w *writer) file(name string, data []byte) error {
	return w.entry(name, int64(len(data)), func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data)), nil
	})
}

func (w *writer) layer(l SavedLayer) error {
	return w.entry(w.path(l.Digest, ".tar"), l.Size, l.Open)
}

func (w *writer) entry(name string, size int64, open func() (io.ReadCloser, error)) error {
	if w.written[name] {
		return nil
	}
	w.written[name] = true
	header := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0)}
	if err := w.tar.WriteHeader(header); err != nil {
		return err
	}
	from, err := open()
	if err != nil {
		return err
	}
	defer from.Close() // read only
	_, err = io.Copy(w.tar, from)
	return err
}
