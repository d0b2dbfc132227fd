// Package layer stores the layers of images, each one once.
//
// # Contract
//
// A layer is created from its blob alone. So the layers of an image can be created concurrently in
// any order, and images share a layer. A layer becomes visible when it is complete, its diffID
// matches and its data is on stable storage. The diffID is the digest of the uncompressed tar (OCI
// image-spec "config.md"). A crash leaves a whole layer or none.
//
// A layer's name is made of the digests of its blob and its tar (Source). A blob could compromise
// the process that unpacks it, which could then report a false tar digest or write other files. So
// a layer serves only images that name the same blob. A tar that is compressed in two ways becomes
// two layers. Layers of berth up to 0.2.0 have their diffID as name and serve the images recorded
// then.
//
// Two properties of a layer depend on the layers below it. They are the targets of some hard links,
// and the attributes of directories that its tar does not list. Stack resolves them for a chain of
// layers. For the directory driver it creates joins. A join is a small extra layer that contains
// such hard links and directories. It is mounted directly above the layer that needs it. For the
// EROFS driver, Stack merges the chain into one image.
//
// A driver defines how a layer is stored. NewDirectory stores a directory tree for overlayfs.
// NewEROFS stores a data file and a tree file, from which an EROFS image is made.
//
// # On disk
//
//	<root>/layers/<hex name>/      a layer: the driver's files, and layer.json
//	<root>/joins/<hex chainID>/    a join or a merged image: the driver's files, and layer.json
//	<root>/lazy/<hex name>/        an incomplete layer (OpenLazy): package fill's files, index, TOC
//	<root>/{layers,joins,lazy}/set-aside/  unusable layers that may be mounted, see DropSetAside
//	<root>/empty-<kind>/           an empty layer
//	<root>/tmp/                    layers under construction; the next Open deletes them
//	<root>/trash/                  layers under deletion
//
// # Errors
//
// Errors of this package carry a gRPC code. It is InvalidArgument for a tar that is no valid layer,
// and FailedPrecondition if the layer exceeds its limits. It is ResourceExhausted if the layer
// would use the disk's reserve. It is DataLoss for a wrong diffID, and NotFound for a missing
// layer. Errors of the caller's reader are returned as they are.
package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
)

// Driver stores layers in one form. It is a Joiner or a Merger. The Store calls its methods
// concurrently for different directories. Each directory belongs to the Store. Its mode is 0700,
// all are on one filesystem, and the Store uses the file layer.json in it.
type Driver interface {
	// Kind returns the form.
	Kind() rootfs.Kind

	// Apply writes the layer of the tar in blob into dir, which is empty. It reads blob to its end.
	// It need not sync. After an error the Store deletes dir.
	Apply(ctx context.Context, dir string, blob io.Reader, job unpack.Job) (unpack.Result, error)

	// OpenContent opens the content of the layer's files in dir, for the record of its tar.
	OpenContent(dir string) (Content, error)

	// Remove deletes dir and its content. It may return ctx's error when ctx is done.
	Remove(ctx context.Context, dir string) error
}

// Joiner is a Driver whose layers overlayfs stacks, with joins between them.
type Joiner interface {
	Driver

	// Empty writes an empty layer into dir, which is empty.
	Empty(dir string) error

	// Join writes a join for top into the empty directory dir. below lists the directories of the
	// layers and joins below, lowest first. It returns false if top needs no join; the Store then
	// deletes dir. Join pays effort for its work. Errors: InvalidArgument for a hard link without a
	// target, FailedPrecondition if the effort does not suffice.
	Join(effort *Effort, dir string, top Part, below []string) (Usage, bool, error)

	// Layer returns the layer to mount for the content of dir.
	Layer(dir string) rootfs.Layer
}

// Merger is a Driver that merges a chain of layers into one image.
type Merger interface {
	Driver

	// Merge writes the image of a chain of layers into the empty directory dir. chain lists the
	// layers' directories, lowest first. used lists the positions in chain of the layers whose data
	// the image refers to. Merge subtracts its work from effort. Errors: InvalidArgument for a
	// hard link without a target, FailedPrecondition if effort does not suffice.
	Merge(effort *Effort, dir string, chain []string) (_ Usage, used []int, err error)

	// Image returns the layer to mount for the image in dir. data lists the directories of the
	// layers to which the image refers, in order.
	Image(dir string, data []string) rootfs.Layer

	// TreeDigest returns the digest of the tree file of the layer in dir. The tree file contains
	// everything except the content of files, which checksum.Sum covers. A tree file of more than
	// limit bytes is FailedPrecondition, because the process that wrote it may have been
	// compromised.
	TreeDigest(ctx context.Context, dir string, limit int64) (digest.Digest, error)
}

// Part is the topmost layer of a join.
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

// Name returns the layer's name in a Store. If Blob is empty, the name is the diffID.
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
	// Name is the layer's name. The JSON field is called diffID because up to 0.2.0 the name was
	// the diffID.
	Name digest.Digest `json:"diffID"`
	Source
	TarBytes int64       `json:"tarBytes"` // length of the tar
	Kind     rootfs.Kind `json:"kind"`
	unpack.Summary
	// Tree is the digest of the tree file of a Merger. It also covers times and extended
	// attributes, which Sum omits.
	Tree digest.Digest `json:"tree,omitempty"`
	// Numbers of Links and Implied in the record.
	PendingLinks int `json:"pendingLinks,omitempty"`
	ImpliedDirs  int `json:"impliedDirs,omitempty"`
	// TarDigest is the digest of the tar if it differs from DiffID, see Store.CreateFile.
	TarDigest digest.Digest `json:"tarDigest,omitempty"`
	// Record is the length of the record of the tar, in bytes; 0: the tar cannot be restored.
	Record int64 `json:"record,omitempty"`
	// Incomplete means that the layer can be used, but parts of its content are missing. The usage
	// is already the usage of the complete layer.
	Incomplete bool `json:"-"`
}

// check returns an error if the record does not belong to the directory dir.
func (i Info) check(dir string) error {
	if i.Name.Validate() != nil || i.Name.Encoded() != dir || i.Source != (Source{}) && i.Source.Name() != i.Name {
		return fmt.Errorf("record belongs to %q", i.Name)
	}
	return nil
}

// mayNeedJoin reports whether the layer may need a join. lowest says that it is the lowest layer.
func (i Info) mayNeedJoin(lowest bool) bool {
	return i.PendingLinks > 0 || i.ImpliedDirs > 0 && !lowest
}

// layerRecord is the record of a layer on disk.
type layerRecord struct {
	Info
	Links   []unpack.Link `json:"links,omitempty"`
	Implied []unpack.Name `json:"implied,omitempty"`
}

// join describes a join, or the merged image of a chain. It is also the record on disk.
type join struct {
	ChainID digest.Digest   `json:"chainID"`
	Layers  []digest.Digest `json:"layers"` // names of the chain's layers; the join is removed with the first of them
	Kind    rootfs.Kind     `json:"kind"`
	Usage   Usage           `json:"usage"`
	Empty   bool            `json:"empty,omitempty"` // the chain needs no join; recorded if the check was expensive
	Data    []digest.Digest `json:"data,omitempty"`  // the layers that a merged image refers to, in order
	onDisk  bool

	mount atomic.Pointer[os.File] // the mount of a merged image
}

// RejectsContent reports whether an error is due to the content of a layer.
func RejectsContent(err error) bool {
	switch unpack.CodeOf(err) {
	case unpack.FailedPrecondition, unpack.MoreMemory, unpack.MoreWindow:
		return true
	}
	return errdefs.Code(err) == codes.InvalidArgument || errors.Is(err, ErrTooLarge)
}
