// Package image keeps the node's images: it pulls them from registries (package
// image/registry), stores their layers (package image/layer) and remembers them
// across restarts and power cuts.
//
// # Contract
//
// An image is identified by the digest of its configuration. That names the tars of its layers, not the
// blobs; what a blob became is not given to who asked for another (package layer). So the image that comes second with
// the configuration of one that is here, and with other blobs, is another image: its ID is made of the digests
// of both. An image exists from the
// moment its record is durable, which is after all its layers are; before that
// nothing of it is visible, and what a failed pull leaves behind is deleted.
// Images are immutable: List and Get read a snapshot behind an atomic pointer and
// touch neither locks nor disk. Changes of records are made by one writer at a
// time.
//
// A layer lives as long as an image has it, a holder (a container) holds it or a
// pull needs it. Until CollectGarbage has been called nothing is deleted, because
// holders of an earlier daemon may not have registered yet.
//
// Errors carry gRPC codes. Pull keeps the codes of package registry, with one
// exception: kubelet recognizes a registry that is down by codes.Unknown and a
// text that begins with "RegistryUnavailable" (k8s.io/cri-api/pkg/errors and
// k8s.io/cri-client PullImage), so that error must reach it without a prefix.
package image
