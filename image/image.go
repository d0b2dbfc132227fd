package image

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/layer"
	"berth/image/registry"
	"berth/internal/errdefs"
)

// Image is an image of the node. It is shared and must not be changed.
type Image struct {
	ID          string              // "sha256:" and the digest of the configuration, or imageRecord.otherID
	RepoTags    []string            // normalized name:tag, sorted
	RepoDigests []string            // normalized name@digest; the last one was pulled last
	Size        uint64              // bytes on disk: configuration and layers, shared layers in full
	Pinned      bool                // excluded from kubelet's garbage collection
	Config      ocispec.ImageConfig // the part that containers use: no labels, ports
	Layers      []digest.Digest     // names in the layer store, bottom first
	Raw         []byte              // the configuration as the registry served it, see Specification
	Artifact    *registry.Artifact  // the artifact that this is; nil: a container image

	decisions map[digest.Digest]string // see record.Decisions
}

// ArtifactType is the annotation with the type of an artifact in CRI's image lists, which have no
// field for the type.
const ArtifactType = "berth.artifact-type"

// CheckRunnable returns FailedPrecondition for an artifact, which has no root filesystem.
func (i *Image) CheckRunnable() error {
	if i.Artifact == nil {
		return nil
	}
	name := i.ID
	if names := slices.Concat(i.RepoTags, i.RepoDigests); len(names) > 0 {
		name = names[0]
	}
	return errdefs.FailedPrecondition(
		"image %s is an OCI artifact of type %q: a container can mount it as an image volume but not run it", name, i.Artifact.Type)
}

// Specification decodes the complete configuration. The decoded form is not cached, because callers
// are rare and it takes several times the memory.
func (i *Image) Specification() (ocispec.Image, error) {
	var c ocispec.Image
	if err := json.Unmarshal(i.Raw, &c); err != nil {
		return c, fmt.Errorf("decode configuration of image %s: %w", i.ID, err)
	}
	return c, nil
}

// DigestedReference returns the name@digest that container status reports for this image, or "" if
// the image has none. The digest names the manifest or index. Among several names DigestedReference
// prefers the name that the user wrote, then a name in the same repository, then the name pulled
// last.
func (i *Image) DigestedReference(written string) string {
	if ref, err := registry.ParseReference(written); err == nil {
		if ref.Digest != "" && slices.Contains(i.RepoDigests, ref.String()) {
			return ref.String()
		}
		for _, name := range slices.Backward(i.RepoDigests) {
			if strings.HasPrefix(name, ref.Name()+"@") {
				return name
			}
		}
	}
	if len(i.RepoDigests) == 0 {
		return ""
	}
	return i.RepoDigests[len(i.RepoDigests)-1]
}

// ofContainers returns the part of a configuration that containers use. Each container's record
// contains a copy.
func ofContainers(c ocispec.ImageConfig) ocispec.ImageConfig {
	return ocispec.ImageConfig{
		User:       c.User,
		Env:        c.Env,
		Entrypoint: c.Entrypoint,
		Cmd:        c.Cmd,
		Volumes:    c.Volumes,
		WorkingDir: c.WorkingDir,
		StopSignal: c.StopSignal,
	}
}

// Snapshot is an immutable snapshot of all images.
type Snapshot struct {
	images  []*Image // sorted by ID
	byID    map[string]*Image
	byName  map[string]*Image      // tags and digests
	records map[string]imageRecord // by ID
	bytes   uint64                 // of all records, on disk
	pinned  map[string]bool        // names that kubelet must not collect
}

// newSnapshot builds a snapshot of records and reuses the unchanged images of the last snapshot,
// which may be nil. Every configuration in records can be parsed, because decodeRecord or the pull
// has checked it.
func newSnapshot(records map[string]imageRecord, last *Snapshot, pinned map[string]bool) *Snapshot {
	x := &Snapshot{byID: map[string]*Image{}, byName: map[string]*Image{}, records: records, pinned: pinned}
	for id, rec := range records {
		x.bytes += rec.diskSize()
		img := last.unchanged(id, rec)
		if img == nil {
			img = rec.image(id, pinned)
		}
		x.images = append(x.images, img)
		x.byID[id] = img
		for _, name := range slices.Concat(img.RepoTags, img.RepoDigests) {
			x.byName[name] = img
		}
	}
	slices.SortFunc(x.images, func(a, b *Image) int { return strings.Compare(a.ID, b.ID) })
	return x
}

// unchanged returns the image of a record if the record is the same as in x, else nil.
func (x *Snapshot) unchanged(id string, rec imageRecord) *Image {
	if x == nil || x.records[id].Sequence != rec.Sequence {
		return nil
	}
	return x.byID[id]
}

// minPrefix is the shortest ID prefix that find accepts. Shorter prefixes are valid image names,
// and kubelet would take such a name for a present image.
const minPrefix = 7

// find returns the image that ref names, see Store.Get.
func (x *Snapshot) find(ref string) (*Image, error) {
	hex, isID := strings.CutPrefix(ref, "sha256:")
	if img, ok := x.byID["sha256:"+hex]; ok {
		return img, nil
	}
	if !isID {
		if r, err := registry.ParseReference(ref); err == nil {
			if img, ok := x.byName[r.String()]; ok {
				return img, nil
			}
		}
	}
	return x.findPrefix(ref, hex)
}

func (x *Snapshot) findPrefix(ref, hex string) (*Image, error) {
	if ref == "" {
		return nil, errdefs.InvalidArgument("image reference is empty")
	}
	notFound := errdefs.NotFound("image %q: not found", ref)
	if len(hex) < minPrefix {
		return nil, notFound
	}
	id := "sha256:" + hex
	first, _ := slices.BinarySearchFunc(x.images, id, func(img *Image, id string) int {
		return strings.Compare(img.ID, id)
	})
	if first == len(x.images) || !strings.HasPrefix(x.images[first].ID, id) {
		return nil, notFound
	}
	if first+1 < len(x.images) && strings.HasPrefix(x.images[first+1].ID, id) {
		return nil, errdefs.InvalidArgument("image ID %q is ambiguous", ref)
	}
	return x.images[first], nil
}

// imageRecord is the record of an image on disk.
type imageRecord struct {
	Sequence uint64   `json:"sequence"` // of the write; if two records have a tag, the record with the higher sequence owns the tag
	Tags     []string `json:"tags,omitempty"`
	Digests  []string `json:"digests,omitempty"`
	Size     uint64   `json:"size"`   // of the layers on disk, in bytes
	Config   []byte   `json:"config"` // as the registry served it; the ID is its digest
	Pinned   bool     `json:"pinned,omitempty"`
	Origins  []string `json:"origins,omitempty"` // archives that contain the image, see Preload
	// Registries are the hosts of the registries that have served the image to pulls. Records of
	// berth up to 0.2.0 have none.
	Registries []string `json:"registries,omitempty"`
	// Blobs are the layers' blobs, bottom first. Records of berth up to 0.2.0 have none. The names
	// of their layers are the tars' digests in the configuration.
	Blobs []digest.Digest `json:"blobs,omitempty"`
	// Decisions say, for each layer's name, why a pull fetched the layer at once or lazily.
	Decisions map[digest.Digest]string `json:"decisions,omitempty"`
}

// Directory, kind and schema version of records.
const (
	recordsDir    = "records"
	recordKind    = "image"
	recordVersion = 2 // version 1, up to 0.2.0, is without Blobs
)

// decodeRecord decodes a record and checks that it belongs to the image id.
func decodeRecord(id string, body []byte) (imageRecord, error) {
	var rec imageRecord
	if err := json.Unmarshal(body, &rec); err != nil {
		return rec, fmt.Errorf("decode: %w", err)
	}
	if _, err := rec.config(); err != nil {
		return rec, err
	}
	if got := digest.FromBytes(rec.Config).String(); got != id && rec.otherID() != id {
		return rec, fmt.Errorf("digest of the configuration is %s, not %s", got, id)
	}
	return rec, nil
}

func (r imageRecord) config() (ocispec.Image, error) {
	var c ocispec.Image
	if err := json.Unmarshal(r.Config, &c); err != nil {
		return c, fmt.Errorf("decode configuration: %w", err)
	}
	for _, d := range c.RootFS.DiffIDs {
		if err := d.Validate(); err != nil {
			return c, fmt.Errorf("layer %q: %w", errdefs.Clip(string(d)), err)
		}
	}
	if len(r.Blobs) > 0 && len(r.Blobs) != len(c.RootFS.DiffIDs) {
		return c, fmt.Errorf("%d blobs, %d layers in the configuration", len(r.Blobs), len(c.RootFS.DiffIDs))
	}
	for _, b := range r.Blobs {
		if err := b.Validate(); err != nil {
			return c, fmt.Errorf("blob %q: %w", b, err)
		}
	}
	return c, nil
}

// layers returns the names of the image's layers in the layer store, bottom first.
func (r imageRecord) layers() []digest.Digest {
	c, _ := r.config() // parsed before, see newSnapshot
	names := make([]digest.Digest, 0, len(c.RootFS.DiffIDs))
	for i, diffID := range c.RootFS.DiffIDs {
		from := layer.Source{DiffID: diffID}
		if len(r.Blobs) > 0 {
			from.Blob = r.Blobs[i]
		}
		names = append(names, from.Name())
	}
	return names
}

// otherID returns the ID of an image if another image of the node has the same configuration with
// other blobs.
func (r imageRecord) otherID() string {
	var all strings.Builder
	for _, d := range append([]digest.Digest{digest.FromBytes(r.Config)}, r.layers()...) {
		all.WriteString("image " + d.String() + "\n")
	}
	return digest.FromString(all.String()).String()
}

// image returns the public form of a record.
func (r imageRecord) image(id string, pinned map[string]bool) *Image {
	c, _ := r.config() // parsed before, see newSnapshot
	img := &Image{
		ID:          id,
		RepoTags:    slices.Sorted(slices.Values(r.Tags)),
		RepoDigests: slices.Clone(r.Digests),
		Size:        r.Size + uint64(len(r.Config)),
		Config:      ofContainers(c.Config),
		Layers:      r.layers(),
		Raw:         r.Config,
		Artifact:    registry.ParseArtifact(r.Config),
		decisions:   r.Decisions,
	}
	img.Pinned = r.Pinned
	for _, name := range append(slices.Concat(r.Tags, r.Digests), id) {
		img.Pinned = img.Pinned || pinned[name]
	}
	return img
}

// diskSize estimates the size of the record's file, in whole blocks.
func (r imageRecord) diskSize() uint64 {
	const block, frame = 4096, 256 // frame: the bytes around Config and the names
	n := frame + base64.StdEncoding.EncodedLen(len(r.Config))
	for _, name := range slices.Concat(r.Tags, r.Digests, r.Registries) {
		n += len(name) + len(`"",`)
	}
	for _, b := range r.Blobs {
		n += len(b) + len(`"",`)
	}
	for name, reason := range r.Decisions {
		n += len(name) + len(reason) + len(`"":"",`)
	}
	return uint64((n + block - 1) / block * block)
}

// maxOrigins limits the origins of an image: one archive may exist under several names.
const maxOrigins = 16

// maxDigests limits the digests of an image. A push of the same content in another manifest adds a
// digest.
const maxDigests = 64

// with returns a copy with one more name. The digest of this pull becomes the last digest, for
// DigestedReference. If there are more than maxDigests digests, the first ones are dropped.
func (r imageRecord) with(ref registry.Reference, d digest.Digest) imageRecord {
	r.Tags, r.Digests = slices.Clone(r.Tags), slices.Clone(r.Digests)
	if ref.Tag != "" && !slices.Contains(r.Tags, ref.String()) {
		r.Tags = append(r.Tags, ref.String())
	}
	if d == "" {
		return r
	}
	name := ref.WithDigest(d)
	r.Digests = append(slices.DeleteFunc(r.Digests, func(other string) bool { return other == name }), name)
	r.Digests = r.Digests[max(0, len(r.Digests)-maxDigests):]
	return r
}

// maxRegistries limits the registries of an image.
const maxRegistries = 16

// servedBy returns a copy with one more registry, if host is not empty.
func (r imageRecord) servedBy(host string) imageRecord {
	if host == "" || slices.Contains(r.Registries, host) {
		return r
	}
	r.Registries = append(slices.Clone(r.Registries), host)
	r.Registries = r.Registries[max(0, len(r.Registries)-maxRegistries):]
	return r
}

// from returns a copy with more origins.
func (r imageRecord) from(origins ...string) imageRecord {
	r.Origins = slices.Concat(r.Origins, origins)
	r.Origins = r.Origins[max(0, len(r.Origins)-maxOrigins):]
	return r
}

// losing returns a copy without the tags that another image has now. An image that so loses its
// last tag is no longer pinned. Otherwise each version of a pinned image would stay on disk.
func (r imageRecord) losing(tags ...string) imageRecord {
	had := len(r.Tags)
	for _, tag := range tags {
		r = r.without(tag)
	}
	r.Pinned = r.Pinned && (had == 0 || len(r.Tags) > 0)
	return r
}

// without returns a copy without a tag.
func (r imageRecord) without(tag string) imageRecord {
	r.Tags = slices.DeleteFunc(slices.Clone(r.Tags), func(t string) bool { return t == tag })
	return r
}

// pinnedNames normalizes the configured names of pinned images, which are references or IDs.
func pinnedNames(refs []string) (map[string]bool, error) {
	names := map[string]bool{}
	for _, ref := range refs {
		if strings.HasPrefix(ref, "sha256:") {
			names[ref] = true
			continue
		}
		r, err := registry.ParseReference(ref)
		if err != nil {
			return nil, fmt.Errorf("pinned image: %w", err)
		}
		names[r.String()] = true
	}
	return names, nil
}

// Named returns the image with a normalized name, or nil.
func (x *Snapshot) Named(name string) *Image { return x.byName[name] }

// List returns all images, sorted by ID. The caller must not change the slice.
func (x *Snapshot) List() []*Image { return x.images }

// MustBeWhole reports whether an image that a pull has resolved must not depend on its registry,
// because it is pinned.
func (x *Snapshot) MustBeWhole(img *registry.Image, ref registry.Reference) bool {
	names := []string{ref.String(), img.ConfigDigest.String()}
	if img.Digest != "" {
		names = append(names, ref.WithDigest(img.Digest))
	}
	if slices.ContainsFunc(names, func(name string) bool { return x.pinned[name] }) {
		return true
	}
	recorded := x.byID[img.ConfigDigest.String()]
	return recorded != nil && recorded.Pinned
}

// HasOrigin reports whether an image came from an archive, see Naming.
func (x *Snapshot) HasOrigin(origin string) bool {
	for _, rec := range x.records {
		if slices.Contains(rec.Origins, origin) {
			return true
		}
	}
	return false
}

// Served are a layer and a registry that has served it.
type Served struct {
	Registry string
	layer.Source
}

// ServedLayers returns the layers of the container images that registries have served.
func (x *Snapshot) ServedLayers() (list []Served) {
	seen := map[Served]bool{}
	for _, rec := range x.records {
		c, err := rec.config() // also compares the number of blobs
		if err != nil || registry.ParseArtifact(rec.Config) != nil {
			continue
		}
		for _, domain := range rec.Registries {
			for i, blob := range rec.Blobs {
				k := Served{domain, layer.Source{Blob: blob, DiffID: c.RootFS.DiffIDs[i]}}
				if !seen[k] {
					seen[k] = true
					list = append(list, k)
				}
			}
		}
	}
	return list
}
