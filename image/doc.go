// Package image is the node's image store: which images there are, under which names, and which
// layers they need. Package image/pull adds images, package image/layer has their layers, and
// package image/lazy has the layers that are used before they are complete.
//
// Four types explain the rest:
//
//   - [Image] is what a caller sees of an image. It is immutable.
//   - [Snapshot] is all images of one moment. List, Get and the pulls read it behind an atomic
//     pointer, and use neither locks nor the disk.
//   - [Store] changes images. One writer at a time writes a record, and then makes the next
//     Snapshot visible.
//   - layer.Store, one for each form of layers (directories, EROFS), has the files. A layer's name is
//     made of the digests of its blob and its tar.
//
// # A pull
//
// A pull acquires the layers of its image ([Store.Acquire]), so that nothing deletes them. It
// creates the missing layers in a layer store, and commits the image ([Store.Commit]). The record
// is written last, so an image exists from the moment its record is durable, and a partial image is
// never visible. The content that a failed pull has received is kept for the next pull, for
// Config.PartialTTL. If disk space is short, it is deleted first.
//
// # A container
//
// A container holds its layers ([Store.Hold]) until it is removed ([Store.Release]). A layer stays
// as long as an image, a holder or a pull needs it. Nothing is deleted before
// [Store.CollectGarbage], because the holders of an earlier daemon may not have registered yet.
//
// # Names
//
// The ID of an image is the digest of its configuration. The configuration names the tars of the
// layers but not the blobs, and images share a layer only if they name the same blob. If a second
// image has the same configuration and other blobs, its ID is derived from both.
//
// # Errors
//
// Errors carry gRPC codes. Kubelet recognizes the error for an image that the signature policy
// rejects by its text, which begins with "SignatureValidationFailed" (k8s.io/cri-api/pkg/errors).
// That error must reach kubelet without a prefix.
package image
