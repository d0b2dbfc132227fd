// Package pull adds images to the node's store: from registries, from other nodes and from
// archives.
//
// # Contract
//
// [Puller.Pull] returns after the image is recorded, or leaves only data that the next pull can
// use. A pull may use a present layer only if its registry has shown that it would serve the layer
// to this pull (docs/adr/001-layer-access.md). Concurrent pulls share downloads. When a pull ends,
// its downloads continue for other pulls that wait for them.
//
// # Retries
//
// Puller.retry is the only loop of this package that repeats failed work. It asks the function next
// what follows a fault. Calls of retry are nested, and each can change something else. A fault that
// needs another change ends the inner loop with its error, and the outer loop decides:
//
//	caller     repeats                            can change
//	pull       the whole image                    the name that a short name stands for
//	add        all layers, then the commit        the layer driver; whole layers instead of indexes
//	share      one layer's shared download        after another pull's failure: its own download
//	download   one layer's transfer               peer, registry instead of peers, host, memory
//	use        a download that proves access      host
//	loadLayer  one layer of an archive            memory
//
// Two kinds of retries are elsewhere. A [registry.Blob] continues after an interruption, with the
// same host or the next one. Only wrong content reaches the loop of download. A layer that cannot
// be created from its index is fetched whole at once, by layerFetch.get.
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
// Errors have the codes of package registry, with one exception. kubelet recognizes an unavailable
// registry by codes.Unknown and by a text that begins with "RegistryUnavailable"
// (k8s.io/cri-api/pkg/errors and k8s.io/cri-client PullImage). This error must reach kubelet
// without a prefix. The same holds for the error of a rejected signature, see package image.
package pull
