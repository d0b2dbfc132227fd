// Package layer keeps the layers of images, each one once.
//
// # Contract
//
// A layer is made from its blob alone, so all layers of an image can be
// made at once, in any order, and are shared by every image that has them. It is
// visible only when it is complete, its diffID (the digest of its uncompressed tar, OCI
// image-spec "config.md") was right, and its data is on
// stable storage; a crash at any moment leaves a whole layer or none.
//
// A layer's name is made of the digests of its blob and of its tar (Source). Whoever unpacks a blob may have
// been taken over by it and say what it likes of the tar, and of the files; so what a blob became is
// for those only who ask for that very blob. The same tar compressed in two ways is two layers. What berth up to 0.2.0
// unpacked is named by its diffID, and serves the images that it recorded then.
//
// What a layer says about the layers below it cannot be known while it is made:
// the target of a hard link, the attributes of a directory that the tar does not
// list. Stack, which knows the layers below, settles that: it puts a join, a small
// layer of its own for this one chain of layers, on top of the layer that needs one.
//
// The form in which a layer is stored is the Driver's affair. NewDirectory keeps
// directories in overlayfs' own form.
//
// # On disk
//
//	<root>/layers/<hex name>/      a layer: what the driver made, and layer.json
//	<root>/joins/<hex chainID>/    a join: the same, and the layers it is for
//	<root>/{layers,joins}/set-aside/  what cannot be used and may be mounted, see DropSetAside
//	<root>/empty-<kind>/           a layer with nothing in it
//	<root>/tmp/                    what is being made; trash at the next Open
//	<root>/trash/                  what is being deleted
//
// # Errors
//
// Those of this package carry a gRPC code: InvalidArgument for a tar that is no
// layer, ResourceExhausted where it exceeds its Limits or the disk is full but for the Reserve,
// DataLoss for a wrong diffID, NotFound for a layer that is not there. Errors of
// the caller's reader are passed on.
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

// Driver is one form of storing layers. Its methods are called concurrently,
// for different directories. Every directory it is given is the Store's: 0700,
// on one filesystem, and the file layer.json in it is not the driver's.
type Driver interface {
	// Kind is the form.
	Kind() rootfs.Kind

	// Apply writes the layer whose tar is in blob into dir, which is empty. It reads
	// to the end of blob. What it wrote need not be synced. After an error dir is removed.
	Apply(ctx context.Context, dir string, blob io.Reader, job unpack.Job) (unpack.Result, error)

	// Empty writes a layer with nothing in it into dir, which is empty.
	Empty(dir string) error

	// Join writes into dir, which is empty, what top needs from what lies below it:
	// the directories of layers and joins, lowest first. It reports false if that is
	// nothing; then dir is removed. A hard link to nowhere is InvalidArgument. What it takes it
	// pays for; if that is too much it is ResourceExhausted.
	Join(effort *Effort, dir string, top Part, below []string) (Usage, bool, error)

	// Layer tells how to mount what Apply or Join left in dir.
	Layer(dir string) rootfs.Layer

	// Remove deletes dir and everything in it. It may give up when ctx is done, with ctx's error.
	Remove(ctx context.Context, dir string) error
}

// Merger is a Driver that makes one image of a whole chain of layers; there are no joins then.
type Merger interface {
	Driver

	// Merge writes into dir, which is empty, the image of a chain of layers, whose directories are given lowest first.
	// used are those that the image refers to, by index. A hard link to nowhere is InvalidArgument. What it takes it
	// pays for; if that is too much it is ResourceExhausted.
	Merge(effort *Effort, dir string, chain []string) (_ Usage, used []int, err error)
}

// TreeDigester is a Driver that keeps the tree of a layer as one file.
type TreeDigester interface {
	Driver

	// TreeDigest returns the digest of the tree file of the layer in dir: all that Apply left there but the content of files, which
	// checksum.Sum covers. A tree of more than limit bytes is ResourceExhausted: the process that wrote it may have been
	// compromised.
	TreeDigest(ctx context.Context, dir string, limit int64) (digest.Digest, error)
}

// Part is a layer as Join sees it.
type Part struct {
	Dir      string
	Contents unpack.Contents
}

// Usage is what something takes on disk.
type Usage = unpack.Usage

// Source is what a layer is made from.
type Source struct {
	Blob   digest.Digest `json:"blob,omitempty"` // the tar as a registry has it; empty up to 0.2.0
	DiffID digest.Digest `json:"tar,omitempty"`  // the tar itself
}

// Name is the layer's name in a Store. That of a Source without Blob is its diffID.
func (s Source) Name() digest.Digest {
	if s.Blob == "" {
		return s.DiffID
	}
	return digest.FromString("layer " + s.DiffID.String() + " of " + s.Blob.String())
}

// Validate fails if a digest is none.
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

// Info is what a Store knows of a layer.
type Info struct {
	// Name is what the layer is asked for by. The name of the field in the file is of the time when that was the diffID.
	Name digest.Digest `json:"diffID"`
	Source
	TarBytes int64       `json:"tarBytes"` // length of the tar
	Kind     rootfs.Kind `json:"kind"`
	unpack.Summary
	// Tree is the digest of a TreeDigester's tree file. It covers what Sum leaves out: times and extended attributes.
	Tree digest.Digest `json:"tree,omitempty"`
	// How many Links and Implied its record has.
	PendingLinks int `json:"pendingLinks,omitempty"`
	ImpliedDirs  int `json:"impliedDirs,omitempty"`
}

// check fails if the record is not that of the layer whose directory has the name dir.
func (i Info) check(dir string) error {
	if i.Name.Validate() != nil || i.Name.Encoded() != dir || i.Source != (Source{}) && i.Source.Name() != i.Name {
		return fmt.Errorf("it is the record of %q", i.Name)
	}
	return nil
}

// mayNeedJoin reports whether the layer, on top of others or lowest, may need a join.
func (i Info) mayNeedJoin(lowest bool) bool {
	return i.PendingLinks > 0 || i.ImpliedDirs > 0 && !lowest
}

// record is the file of a layer.
type record struct {
	Info
	Links   []unpack.Link `json:"links,omitempty"`
	Implied []unpack.Name `json:"implied,omitempty"`
}

// join is what a Store knows of a join, and its file.
type join struct {
	ChainID digest.Digest   `json:"chainID"`
	Layers  []digest.Digest `json:"layers"` // their names; it goes with the first of these that goes
	Kind    rootfs.Kind     `json:"kind"`
	Usage   Usage           `json:"usage"`
	Empty   bool            `json:"empty,omitempty"` // the chain needs none; on disk if it took long to find that out
	Data    []digest.Digest `json:"data,omitempty"`  // of an image (Merger): the layers that it refers to, in order
	onDisk  bool

	mount atomic.Pointer[os.File] // of an image, once it is mounted
}
