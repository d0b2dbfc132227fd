// Package archive reads and writes archives of images: OCI layouts (image-spec "image-layout.md"),
// as a directory or a tar, and the tars of `docker save`.
//
// # Contract
//
// An archive may come from anyone. The package opens no path outside of the archive. It bounds the
// memory for the list of files and for each document. Documents get the checks that package
// [registry] applies to a registry's documents. A blob is read through a verifier of its size and
// digest, so a file that changes meanwhile gives an error and never wrong content.
//
// go-containerregistry reads the same formats. It does not bound the size of documents, and it
// scans a tar from the start for each file.
package archive

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry"
	"berth/internal/errdefs"
)

// Limits of one archive.
const (
	MaxFiles  = 1 << 16 // entries of a tar
	MaxName   = 1024    // bytes of an entry's name; entries with a longer one are ignored
	MaxImages = 1024
)

// Annotations with the name of an image in the index of an OCI layout.
const (
	nameAnnotation    = "io.containerd.image.name" // a full reference; docker save writes it as well
	refNameAnnotation = ocispec.AnnotationRefName  // a full reference or only a tag
)

// Archive is an open archive, from [OpenTar] or [OpenDir]. It is safe for concurrent use.
type Archive struct {
	open  func(name string) (File, error)
	paths map[digest.Digest]string // of the blobs of a docker archive; nil: an OCI layout
}

// File is a regular file of an archive, from [Archive.BlobAt]. The caller closes it.
type File interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// Image is an image of an archive.
type Image struct {
	*registry.Image
	Names []registry.Reference // with a tag, or with the image's digest
}

// OpenTar opens an archive in a tar of size bytes. It reads the headers of all entries. f must stay
// open while the archive is used.
func OpenTar(f io.ReaderAt, size int64) (*Archive, error) {
	files, err := list(f, size)
	if err != nil {
		return nil, err
	}
	return &Archive{open: func(name string) (File, error) { return files.open(f, name) }}, nil
}

// OpenDir opens an OCI layout in a directory. Symlinks cannot lead out of it. root must stay open
// while the archive is used.
func OpenDir(root *os.Root) *Archive {
	return &Archive{open: func(name string) (File, error) {
		f, err := root.Open(name)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err != nil || !info.Mode().IsRegular() {
			return nil, errors.Join(err, f.Close(), errdefs.InvalidArgument("%s is not a regular file", name))
		}
		return diskFile{f, info.Size()}, nil
	}}
}

type diskFile struct {
	*os.File
	size int64
}

func (f diskFile) Size() int64 { return f.size }

// Images returns the images of the archive for a node's platform, and the entries that are no
// images. It is an error if there is no image. The caller must call it once and before
// [Archive.Blob]. The error is InvalidArgument if the archive is neither an OCI layout nor a docker
// archive.
func (a *Archive) Images(node ocispec.Platform) ([]Image, []Skipped, error) {
	index, err := a.read("index.json", registry.MaxManifestSize)
	if err == nil {
		return a.layoutImages(index, node)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	manifest, err := a.read("manifest.json", registry.MaxManifestSize)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, errdefs.InvalidArgument(
			"neither an OCI layout nor a docker archive: it has no index.json and no manifest.json")
	}
	if err != nil {
		return nil, nil, err
	}
	return a.dockerImages(manifest)
}

// layoutImages returns the images of an OCI layout, and the entries that are no images. An entry of
// the index has one name, so several entries may name one manifest.
func (a *Archive) layoutImages(index []byte, node ocispec.Platform) (images []Image, skipped []Skipped, err error) {
	entries, err := registry.ParseIndex(index)
	if err != nil {
		return nil, nil, fmt.Errorf("index.json: %w", err)
	}
	if len(entries) > MaxImages {
		return nil, nil, errdefs.FailedPrecondition("%d images, more than the limit of %d", len(entries), MaxImages)
	}
	byDigest := map[digest.Digest]int{}
	for _, entry := range entries {
		i, known := byDigest[entry.Digest]
		if !known {
			img, err := registry.ResolveLocal(a.document, entry, node)
			if isSkippable(entry, err) {
				skipped = append(skipped, skippedEntry(entry, err))
				continue
			}
			if err != nil {
				return nil, nil, fmt.Errorf("image %s: %w", entry.Digest, err)
			}
			i = len(images)
			byDigest[entry.Digest] = i
			images = append(images, Image{Image: img})
		}
		if name, ok := nameOf(entry); ok && !slices.Contains(images[i].Names, name) {
			images[i].Names = append(images[i].Names, name)
		}
	}
	images, artifacts := withoutArtifacts(images)
	return found(images, append(skipped, artifacts...), "index.json names no image")
}

// found returns an error if there is no image. It is the error of an entry for another platform, or
// else the error of the first entry.
func found(images []Image, skipped []Skipped, none string) ([]Image, []Skipped, error) {
	if len(images) > 0 {
		return images, skipped, nil
	}
	if len(skipped) == 0 {
		return nil, nil, errdefs.InvalidArgument("%s", none)
	}
	i := max(0, slices.IndexFunc(skipped, func(s Skipped) bool { return errdefs.IsNotFound(s.Reason) }))
	return nil, nil, fmt.Errorf("no entry is an image for this node: %s: %w", skipped[i].Name, skipped[i].Reason)
}

// nameOf returns the name in the annotations of an index's entry. A plain tag is no name, because
// the name of the repository is unknown. A digest must be the digest of the entry.
func nameOf(entry ocispec.Descriptor) (registry.Reference, bool) {
	text := entry.Annotations[nameAnnotation]
	if ref := entry.Annotations[refNameAnnotation]; text == "" && strings.ContainsAny(ref, "/:") {
		text = ref
	}
	if strings.HasPrefix(text, "sha256:") { // an ID, not a repository with this name
		return registry.Reference{}, false
	}
	ref, err := registry.ParseReference(text)
	return ref, err == nil && (ref.Tag != "" || ref.Digest == entry.Digest)
}

// document returns a manifest or configuration of an OCI layout.
func (a *Archive) document(want ocispec.Descriptor) ([]byte, error) {
	data, err := a.read(blobPath(want.Digest), registry.MaxManifestSize)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.NotFound("blob %s is not in the archive", want.Digest)
	case err != nil:
		return nil, err
	case want.Digest.Validate() != nil || want.Digest.Algorithm().FromBytes(data) != want.Digest:
		return nil, errdefs.New(codes.DataLoss, "blob %s has another digest", want.Digest)
	}
	return data, nil
}

func blobPath(d digest.Digest) string { return "blobs/" + d.Algorithm().String() + "/" + d.Encoded() }

// dockerImage is an entry of manifest.json in a docker archive.
type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// dockerImages returns the images of a docker archive, and the entries that are no images. The
// archive's manifest names files and no digests. Blob verifies a layer by the digest that
// dockerLayer computes.
func (a *Archive) dockerImages(manifest []byte) (images []Image, skipped []Skipped, err error) {
	var entries []dockerImage
	if err := registry.CheckValues(manifest); err != nil {
		return nil, nil, fmt.Errorf("manifest.json: %w", err)
	}
	if err := json.Unmarshal(manifest, &entries); err != nil {
		return nil, nil, errdefs.InvalidArgument("manifest.json: %w", err)
	}
	if len(entries) > MaxImages {
		return nil, nil, errdefs.FailedPrecondition("%d images, more than the limit of %d", len(entries), MaxImages)
	}
	a.paths = map[digest.Digest]string{}
	layers := map[string]ocispec.Descriptor{}
	for i, entry := range entries {
		if isAttachment(entry.RepoTags) {
			reason := errdefs.FailedPrecondition("the name is that of a signature or attestation")
			skipped = append(skipped, Skipped{errdefs.Clip(entry.RepoTags[0]), reason})
			continue
		}
		img, err := a.dockerImage(entry, layers)
		if err != nil {
			return nil, nil, fmt.Errorf("image %d: %w", i, err)
		}
		images = append(images, img)
	}
	return found(images, skipped, "manifest.json names no image")
}

func (a *Archive) dockerImage(entry dockerImage, known map[string]ocispec.Descriptor) (Image, error) {
	if len(entry.Layers) > registry.MaxLayers {
		return Image{}, errdefs.FailedPrecondition("image has %d layers, more than the %d that can be mounted",
			len(entry.Layers), registry.MaxLayers)
	}
	config, err := a.read(entry.Config, registry.MaxConfigSize)
	if err != nil {
		return Image{}, fmt.Errorf("config: %w", err)
	}
	var blobs []ocispec.Descriptor
	for i, name := range entry.Layers {
		blob, ok := known[name]
		if !ok {
			if blob, err = a.dockerLayer(name); err != nil {
				return Image{}, fmt.Errorf("layer %d: %w", i, err)
			}
			known[name] = blob
		}
		blobs = append(blobs, blob)
	}
	img := Image{}
	if img.Image, err = registry.LocalImage(config, blobs); err != nil {
		return Image{}, err
	}
	for _, tag := range entry.RepoTags {
		if ref, err := registry.ParseReference(tag); err == nil && ref.Tag != "" {
			img.Names = append(img.Names, ref)
		}
	}
	return img, nil
}

// dockerLayer describes a layer of a docker archive. It reads the whole layer to compute its
// digest.
func (a *Archive) dockerLayer(name string) (ocispec.Descriptor, error) {
	f, err := a.open(path.Clean(name))
	if err != nil {
		return ocispec.Descriptor{}, inArchive(name, err)
	}
	defer f.Close() // read only
	d, err := digest.SHA256.FromReader(bufio.NewReaderSize(io.NewSectionReader(f, 0, f.Size()), 1<<20))
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("read %q: %w", errdefs.Clip(name), err)
	}
	a.paths[d] = path.Clean(name)
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: d, Size: f.Size()}, nil
}

// read returns a small file.
func (a *Archive) read(name string, limit int64) ([]byte, error) {
	f, err := a.open(path.Clean(name))
	if err != nil {
		return nil, inArchive(name, err)
	}
	defer f.Close() // read only
	if f.Size() > limit {
		return nil, errdefs.FailedPrecondition("%q has %d bytes, more than the limit of %d", errdefs.Clip(name),
			f.Size(), limit)
	}
	var data bytes.Buffer
	if _, err := io.Copy(&data, io.NewSectionReader(f, 0, f.Size())); err != nil {
		return nil, fmt.Errorf("read %q: %w", errdefs.Clip(name), err)
	}
	if int64(data.Len()) != f.Size() {
		return nil, errdefs.New(codes.DataLoss, "%q ends after %d of %d bytes", errdefs.Clip(name), data.Len(), f.Size())
	}
	return data.Bytes(), nil
}

func inArchive(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(codes.InvalidArgument, "%q is not in the archive: %w", errdefs.Clip(name), err)
	}
	return err
}

// Blob opens a layer's blob. Its Read returns io.EOF only after it has verified size and digest. If
// they are wrong, the error is DataLoss. The caller closes it.
func (a *Archive) Blob(want ocispec.Descriptor) (io.ReadCloser, error) {
	f, err := a.BlobAt(want)
	if err != nil {
		return nil, err
	}
	return &verifier{
		from: io.NewSectionReader(f, 0, f.Size()), file: f, want: want, hash: want.Digest.Algorithm().Hash(),
	}, nil
}

// BlobAt opens a blob for reads of any part, which are not verified. The errors are those of
// [Archive.Blob].
func (a *Archive) BlobAt(want ocispec.Descriptor) (File, error) {
	if err := want.Digest.Validate(); err != nil {
		return nil, errdefs.InvalidArgument("digest %q: %w", errdefs.Clip(string(want.Digest)), err)
	}
	name, ok := a.paths[want.Digest]
	if a.paths == nil {
		name, ok = blobPath(want.Digest), true
	}
	if !ok {
		return nil, errdefs.InvalidArgument("blob %s is not in the archive", want.Digest)
	}
	f, err := a.open(name)
	if err != nil {
		return nil, inArchive(name, err)
	}
	if f.Size() != want.Size {
		_ = f.Close() // read only
		return nil, errdefs.New(codes.DataLoss, "blob %s has %d bytes, not %d", want.Digest, f.Size(), want.Size)
	}
	return f, nil
}

// verifier checks the size and the digest of a blob at its end.
type verifier struct {
	from io.Reader
	file io.Closer
	want ocispec.Descriptor
	hash hash.Hash
	n    int64
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.from.Read(p)
	v.hash.Write(p[:n])
	v.n += int64(n)
	if err == io.EOF {
		if got := digest.NewDigest(v.want.Digest.Algorithm(), v.hash); got != v.want.Digest || v.n != v.want.Size {
			return n, errdefs.New(codes.DataLoss, "blob %s: %d bytes with the digest %s", v.want.Digest, v.n, got)
		}
	}
	return n, err
}

func (v *verifier) Close() error { return v.file.Close() }
