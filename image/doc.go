// Package image is the node's image store. It pulls images from registries (package
// image/registry), stores their layers (package image/layer) and keeps records that survive
// restarts and power failures.
//
// # Contract
//
// The ID of an image is the digest of its configuration. The configuration names the tars of the
// layers but not the blobs, and images share a layer only if they name the same blob. If a second
// image has the same configuration and other blobs, its ID is derived from both.
//
// An image exists from the moment its record is durable. The record is written after all layers, so
// a partial image is never visible. What a failed pull has received is kept for Config.PartialTTL,
// for the next pull, and deleted before anything else. Images are immutable: List and Get read a
// snapshot behind an atomic pointer and use neither locks nor the disk. One writer at a time
// changes records.
//
// A layer stays as long as an image, a holder (a container) or a pull needs it. Nothing is deleted
// before CollectGarbage, because the holders of an earlier daemon may not have registered yet.
//
// Errors carry gRPC codes. Pull keeps the codes of package registry, with one exception: kubelet
// recognizes an unavailable registry by codes.Unknown and a text that begins with
// "RegistryUnavailable" (k8s.io/cri-api/pkg/errors and k8s.io/cri-client PullImage). That error
// must reach kubelet without a prefix. So must the error for an image that the signature
// policy rejects, which begins with "SignatureValidationFailed".
package image
