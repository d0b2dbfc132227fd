package peers

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
)

// Key names a layer. It has the layer's digests in the manifest and the configuration of an image,
// and the host of the registry that has confirmed the layer.
type Key struct {
	Registry string        `json:"registry"`
	Blob     digest.Digest `json:"blob"`
	DiffID   digest.Digest `json:"diffID"`
}

// maxRegistry is the longest name of a registry: a domain name (RFC 1035) with a port.
const maxRegistry = 253 + len(":65535")

// Validate returns an error for a key that cannot name a layer.
func (k Key) Validate() error {
	if err := k.Blob.Validate(); err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	if err := k.DiffID.Validate(); err != nil {
		return fmt.Errorf("diffID: %w", err)
	}
	if k.Registry == "" || len(k.Registry) > maxRegistry || strings.ContainsAny(k.Registry, "/ \n") {
		return errors.New("invalid name of a registry")
	}
	return nil
}

// layerPath is the path of the tars of layers; the digest of the blob follows.
const layerPath = "/berth/v1/layers/"

// path returns the path and query of the layer at a peer.
func (k Key) path() string {
	query := url.Values{"registry": {k.Registry}, "diffID": {k.DiffID.String()}}
	return layerPath + k.Blob.String() + "?" + query.Encode()
}

// keyOf parses what path returns.
func keyOf(u *url.URL) (Key, error) {
	query := u.Query()
	k := Key{
		Registry: query.Get("registry"),
		Blob:     digest.Digest(strings.TrimPrefix(u.Path, layerPath)),
		DiffID:   digest.Digest(query.Get("diffID")),
	}
	return k, k.Validate()
}

// homes returns the home nodes of a layer, in the order to ask them. Nodes with the same members
// get the same result. If one member changes, the home nodes of few layers change.
func homes(members []string, k Key, count int) []string {
	type ranked struct {
		address string
		weight  uint64
	}
	list := make([]ranked, 0, len(members))
	for _, m := range members {
		sum := sha256.Sum256([]byte(m + "\n" + k.Registry + "\n" + k.Blob.String() + "\n" + k.DiffID.String()))
		list = append(list, ranked{m, binary.BigEndian.Uint64(sum[:])})
	}
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), strings.Compare(a.address, b.address))
	})
	addresses := make([]string, 0, count)
	for _, r := range list[:min(count, len(list))] {
		addresses = append(addresses, r.address)
	}
	return addresses
}
