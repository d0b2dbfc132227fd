// Package layer keeps the layers of images, each one once, named by its diffID
// (the digest of its uncompressed tar, OCI image-spec "config.md").
//
// # Contract
//
// A layer is made from its tar stream alone, so all layers of an image can be
// made at once, in any order, and are shared by every image that has them. It is
// visible only when it is complete, its diffID was right, and its data is on
// stable storage; a crash at any moment leaves a whole layer or none.
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
//	<root>/layers/<hex diffID>/    a layer: what the driver made, and layer.json
//	<root>/joins/<hex chainID>/    a join: the same, and the layers it is for
//	<root>/empty-<kind>/           a layer with nothing in it
//	<root>/tmp/                    what is being made; trash at the next Open
//	<root>/trash/                  what is being deleted
//
// # Errors
//
// Those of this package carry a gRPC code: InvalidArgument for a tar that is no
// layer, ResourceExhausted where it exceeds its Limits or the disk is full,
// DataLoss for a wrong diffID, NotFound for a layer that is not there. Errors of
// the caller's reader are passed on.
package layer

import (
	"context"
	"fmt"
	"io"
	"net/url"

	"github.com/opencontainers/go-digest"

	"berth/internal/rootfs"
)

// Driver is one form of storing layers. Its methods are called concurrently,
// for different directories. Every directory it is given is the Store's: 0700,
// on one filesystem, and the file layer.json in it is not the driver's.
type Driver interface {
	// Kind is the form.
	Kind() rootfs.Kind

	// Apply writes the layer whose tar is read from tar into dir, which is
	// empty. It reads at least to the end of the archive. What it wrote need not
	// be synced. After an error dir is removed.
	Apply(ctx context.Context, dir string, tar io.Reader, limits Limits) (Contents, error)

	// Join writes into dir, which is empty, what top needs from what lies below it:
	// the directories of layers and joins, lowest first. It reports false if that is
	// nothing; then dir is removed. A hard link to nowhere is InvalidArgument.
	Join(ctx context.Context, dir string, top Part, below []string) (Usage, bool, error)

	// Layer tells how to mount what Apply or Join left in dir.
	Layer(dir string) rootfs.Layer

	// Remove deletes dir and everything in it.
	Remove(dir string) error
}

// Part is a layer as Join sees it.
type Part struct {
	Dir      string
	Contents Contents
}

// Limits bound what a layer may take, against tars made to fill disk or memory.
// A zero field means that of DefaultLimits.
type Limits struct {
	Tar     int64 // length of the tar, which bounds what its files take on disk
	Bytes   int64 // length of all its files, with holes counted
	Entries int64 // entries of the tar
}

// DefaultLimits are far above what is known of real images.
var DefaultLimits = Limits{Tar: 256 << 30, Bytes: 256 << 30, Entries: 4 << 20}

func (l Limits) withDefaults() Limits {
	if l.Tar == 0 {
		l.Tar = DefaultLimits.Tar
	}
	if l.Bytes == 0 {
		l.Bytes = DefaultLimits.Bytes
	}
	if l.Entries == 0 {
		l.Entries = DefaultLimits.Entries
	}
	return l
}

// Usage is what something takes on disk. It is counted when it is made: file
// data in blocks of the filesystem, one block for each directory.
type Usage struct {
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
}

func (u Usage) add(v Usage) Usage { return Usage{u.Bytes + v.Bytes, u.Inodes + v.Inodes} }

// Contents is what a driver found in a layer.
type Contents struct {
	Summary
	// Links are hard links whose target is not in the layer.
	Links []Link `json:"links,omitempty"`
	// Implied are directories that entries lie in and the tar does not list:
	// their attributes are those of the layers below, where they exist there.
	Implied []Name `json:"implied,omitempty"`
	// Unsupported is how many extended attributes the filesystem did not take.
	Unsupported int `json:"-"`
}

// Summary is the part of Contents that a Store keeps in memory.
type Summary struct {
	Usage
	// Opaque: nothing of the layers below is to be seen (an opaque whiteout in the root).
	Opaque bool `json:"opaque,omitempty"`
	// Whiteouts is how many whiteouts the layer has. One that has any shows them as
	// devices if it is not mounted through overlayfs.
	Whiteouts int `json:"whiteouts,omitempty"`
}

// Link is a hard link that is still to be made.
type Link struct {
	Name   Name `json:"name"`
	Target Name `json:"target"`
}

// Name is a path in a layer, relative and clean; "" is the root. In JSON it is
// percent-encoded: names are bytes, of which JSON keeps only UTF-8.
type Name string

// MarshalText implements encoding.TextMarshaler.
func (n Name) MarshalText() ([]byte, error) { return []byte(url.PathEscape(string(n))), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *Name) UnmarshalText(text []byte) error {
	s, err := url.PathUnescape(string(text))
	if err != nil {
		return fmt.Errorf("name in a layer: %w", err)
	}
	*n = Name(s)
	return nil
}

// Info is what a Store knows of a layer.
type Info struct {
	DiffID   digest.Digest `json:"diffID"`
	TarBytes int64         `json:"tarBytes"` // length of the tar
	Kind     rootfs.Kind   `json:"kind"`
	Summary
	// How many Links and Implied its record has.
	PendingLinks int `json:"pendingLinks,omitempty"`
	ImpliedDirs  int `json:"impliedDirs,omitempty"`
}

// mayNeedJoin reports whether the layer, on top of others or lowest, may need a join.
func (i Info) mayNeedJoin(lowest bool) bool {
	return i.PendingLinks > 0 || i.ImpliedDirs > 0 && !lowest
}

// record is the file of a layer.
type record struct {
	Info
	Links   []Link `json:"links,omitempty"`
	Implied []Name `json:"implied,omitempty"`
}

// join is what a Store knows of a join, and its file.
type join struct {
	ChainID digest.Digest   `json:"chainID"`
	Layers  []digest.Digest `json:"layers"` // it goes with the first of these that goes
	Kind    rootfs.Kind     `json:"kind"`
	Usage   Usage           `json:"usage"`
	empty   bool            // the chain needs none: in memory only
}
