// Package peers shares layers between nodes, so that a registry sends a layer to a few nodes only.
//
// # Contract
//
// A node serves the exact tars of the layers that it stores. It restores a tar from the stored
// layer, and keeps no blobs (package image/unpack/tarsplit). The receiver checks a tar by its
// diffID, which the image's configuration names. So a peer can refuse or delay a layer but not
// change it. A peer that sends wrong bytes is not asked again for an hour. Nothing else comes from
// peers.
//
// Each layer has a few home nodes, chosen by hashing the layer with the members' addresses
// (rendezvous hashing). Home nodes know which nodes hold or fetch the layer. If no node has a
// layer, the first node that asks for it must fetch it from the registry. Other nodes wait for that
// node. The knowledge of home nodes is in memory only. If it is lost, a layer is fetched from the
// registry once more.
//
// Members come from the configured seeds, which may be names with many addresses. Berth connects to
// members only, even if a peer names other addresses. TLS 1.3 with certificates of a CA for this
// purpose authenticates both sides. Every holder of a certificate of the CA is a peer.
//
// # Access
//
// The receiving node decides who may use a layer (docs/adr/001-layer-access.md). The registry must
// have served the manifest to the pull, and must confirm that it has the blob. A node serves a
// layer only for a registry from which it has an image with this layer. Otherwise an attacker's
// registry could confirm a blob that it never had.
//
// # Limits
//
// Everything that a peer sends is limited in size, count and time. Connections, waiting requests
// and uploads have limits, and peers with different certificates share them fairly. Uploads also
// have a limit of their bandwidth. A connection counts only after its TLS handshake, so a stranger
// cannot take the place of a peer. Handshakes have limits of their own (see memberListener). The
// lease to fetch a layer belongs to an address and a certificate.
//
// A slow peer costs a pull little time. A Search that makes no progress ends after
// Config.SearchTimeout, and a transfer that is slower than leastRate for Config.Stall.
package peers
