// Package layer stores the layers of images, each one once.
//
// # Contract
//
// A layer is made from its blob alone. So the layers of an image can be made concurrently in any
// order, and all images that have a layer share it. A layer becomes visible when it is complete,
// its diffID (the digest of its uncompressed tar, OCI image-spec "config.md") matches and its data
// is on stable storage. A crash leaves a whole layer or none.
//
// A layer's name is made of the digests of its blob and its tar (Source). A blob could compromise
// the process that unpacks it, which could then report a false tar digest or write other files. So
// a layer serves only images that name its very blob. A tar that is compressed in two ways becomes
// two layers. Layers of berth up to 0.2.0 have their diffID as name and serve the images recorded
// then.
//
// Some properties of a layer depend on the layers below it: the target of a hard link, and the
// attributes of a directory that the tar does not list. Stack, which gets the whole chain, resolves
// them. For directories it adds a join, a small layer on top of the one that needs it. For EROFS it
// merges the chain into one image.
//
// Drivers define how a layer is stored: NewDirectory as a directory tree for overlayfs, NewEROFS as
// two files from which an EROFS image is made.
//
// # On disk
//
//	<root>/layers/<hex name>/      a layer: the driver's files, and layer.json
//	<root>/joins/<hex chainID>/    a join or an image of a chain: the driver's files, and layer.json
//	<root>/{layers,joins}/set-aside/  unusable layers that may still be mounted, see DropSetAside
//	<root>/empty-<kind>/           an empty layer
//	<root>/tmp/                    layers under construction; the next Open deletes them
//	<root>/trash/                  layers under deletion
//
// # Errors
//
// Errors of this package carry a gRPC code: InvalidArgument for a tar that is no valid layer,
// ResourceExhausted if it exceeds its limits or the disk's reserve, DataLoss for a wrong diffID,
// NotFound for a missing layer. Errors of the caller's reader are passed on.
package layer

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"berth/image/unpack"
	"berth/internal/rootfs"
)

// Driver stores layers in one form. It is a Joiner or a Merger. The Store calls its methods
// concurrently for different directories. Each directory belongs to the Store: its mode is 0700,
// all are on one filesystem, and the file layer.json in it is the Store's.
type Driver interface {
	// Kind returns the form.
	Kind() rootfs.Kind

	// Apply writes the layer of the tar in blob into dir, which is empty. It reads blob to its end.
	// It need not sync. After an error the Store deletes dir.
	Apply(ctx context.Context, dir string, blob io.Reader, job unpack.Job) (unpack.Result, error)

	// Remove deletes dir and its content. It may return ctx's error when ctx is done.
	Remove(ctx context.Context, dir string) error
}

// Joiner is a Driver whose layers are mounted above each other, with joins between them.
type Joiner interface {
	Driver

	// Empty writes an empty layer into dir, which is empty.
	Empty(dir string) error

	// Join writes into dir, which is empty, what top needs of the layers and joins below it, whose
	// directories are given lowest first. It returns false if top needs nothing; the Store deletes
	// dir then. A hard link without target is InvalidArgument. Join pays effort for its work;
	// ResourceExhausted if there is not enough.
	Join(effort *Effort, dir string, top Part, below []string) (Usage, bool, error)

	// Layer returns the layer to mount for the content of dir.
	Layer(dir string) rootfs.Layer
}

// Merger is a Driver that makes one image of a chain of layers.
type Merger interface {
	Driver

	// Merge writes the image of a chain of layers into the empty directory dir. chain has the
	// layers' directories, lowest first; used has the indexes of the layers that the image refers
	// to. Merge pays effort for its work. Errors: InvalidArgument for a hard link without a target,
	// ResourceExhausted if the effort does not suffice.
	Merge(effort *Effort, dir string, chain []string) (_ Usage, used []int, err error)

	// Image returns the layer to mount for the image in dir. data are the directories of the layers
	// that it refers to, in order.
	Image(dir string, data []string) rootfs.Layer

	// TreeDigest returns the digest of the tree file of the layer in dir: everything but the
	// content of files, which checksum.Sum covers. A tree file of more than limit bytes is
	// ResourceExhausted: the process that wrote it may have been compromised.
	TreeDigest(ctx context.Context, dir string, limit int64) (digest.Digest, error)
}

// Part is a layer as Join gets it.
type Part struct {
	Dir      string
	Contents unpack.Contents
}

// Usage is a disk usage.
type Usage = unpack.Usage

// Source identifies the blob and the tar of a layer.
type Source struct {
	Blob   digest.Digest `json:"blob,omitempty"` // the compressed tar; empty for layers of berth up to 0.2.0
	DiffID digest.Digest `json:"tar,omitempty"`  // the uncompressed tar
}

// Name returns the layer's name in a Store. For a Source without Blob that is its diffID.
func (s Source) Name() digest.Digest {
	if s.Blob == "" {
		return s.DiffID
	}
	return digest.FromString("layer " + s.DiffID.String() + " of " + s.Blob.String())
}

// Validate returns an error if a digest is malformed.
func (s Source) Validate() error {
	if s.Blob != "" {
		if err := s.Blob.Validate(); err != nil {
			return fmt.Errorf("blob %q: %w", s.Blob, err)
		}
	}
	if err := s.DiffID.Validate(); err != nil {
		return fmt.Errorf("diffID %q: %w", s.DiffID, err)
	}
	return nil
}

// Info describes a layer.
type Info struct {
	// Name is the layer's name. The JSON field is older than that: the name was the diffID.
	Name digest.Digest `json:"diffID"`
	Source
	TarBytes int64       `json:"tarBytes"` // length of the tar
	Kind     rootfs.Kind `json:"kind"`
	unpack.Summary
	// Tree is the digest of the tree file of a Merger. It covers what Sum omits: times and
	// extended attributes.
	Tree digest.Digest `json:"tree,omitempty"`
	// Numbers of Links and Implied in the record.
	PendingLinks int `json:"pendingLinks,omitempty"`
	ImpliedDirs  int `json:"impliedDirs,omitempty"`
}

// check returns an error if the record does not belong to the directory dir.
func (i Info) check(dir string) error {
	if i.Name.Validate() != nil || i.Name.Encoded() != dir || i.Source != (Source{}) && i.Source.Name() != i.Name {
		return fmt.Errorf("record belongs to %q", i.Name)
	}
	return nil
}

// mayNeedJoin reports whether the layer may need a join. lowest: there are no layers below it.
func (i Info) mayNeedJoin(lowest bool) bool {
	return i.PendingLinks > 0 || i.ImpliedDirs > 0 && !lowest
}

// record is the record of a layer on disk.
type record struct {
	Info
	Links   []unpack.Link `json:"links,omitempty"`
	Implied []unpack.Name `json:"implied,omitempty"`
}

// join describes a join or an image of a chain. It is also its record on disk.
type join struct {
	ChainID digest.Digest   `json:"chainID"`
	Layers  []digest.Digest `json:"layers"` // names of the chain's layers; the join is removed with the first of them that is removed
	Kind    rootfs.Kind     `json:"kind"`
	Usage   Usage           `json:"usage"`
	Empty   bool            `json:"empty,omitempty"` // the chain needs no join; on disk if finding that out took long
	Data    []digest.Digest `json:"data,omitempty"`  // of an image (Merger): the layers it refers to, in order
	onDisk  bool

	mount atomic.Pointer[os.File] // of an image, after the first mount
}
