// Package pull adds images to the node's store: from registries, from other nodes and from
// archives.
//
// # Contract
//
// [Puller.Pull] returns after the image is recorded, or leaves nothing but what the next pull can
// continue with. A pull may use a present layer only if its registry has shown that it would serve
// the layer to this pull (docs/adr/001-layer-access.md). Concurrent pulls share downloads. A pull
// that ends leaves its downloads to the others that wait for them.
//
// # One loop
//
// Whatever fails, the function next says what follows: an attempt at the next name, by the other
// layer driver, without indexes, from another peer, from the registry, from the next host or with
// more memory. It is the only place that decides. Puller.retry calls it in a loop for the image,
// for the download that pulls share, and for the transfer of one layer. Each of these offers what
// it can change; a fault that needs another change ends it, and the loop around it decides.
//
// # The way of a layer
//
//	Pull → pullReference    resolve the manifest, check signatures, plan
//	add → addTo             acquire the layers, get each, stack them, commit the image
//	layerFetch.get          reuse a present layer, fetch it lazily, or fetch it whole
//	share                   one download for all pulls of the same layer
//	download.try            from a peer or from the registry, through berth-unpack, to the layer store
//
// # Errors
//
// Errors have the codes of package registry, with one exception: kubelet recognizes an unavailable
// registry by codes.Unknown and a text that begins with "RegistryUnavailable"
// (k8s.io/cri-api/pkg/errors and k8s.io/cri-client PullImage). That error must reach kubelet
// without a prefix, and so must the one of a rejected signature, see package image.
package pull
