// Package trusttest makes keys and signatures of images for tests.
package trusttest

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"

	"berth/image/registry/registrytest"
)

// payload is the text that both kinds of signatures sign, as in containers-signature(5).
func payload(t testing.TB, kind, name string, d digest.Digest) []byte {
	t.Helper()
	data, err := json.Marshal(map[string]any{
		"critical": map[string]any{
			"identity": map[string]string{"docker-reference": name},
			"image":    map[string]string{"docker-manifest-digest": d.String()},
			"type":     kind,
		},
		"optional": map[string]any{},
	})
	must(t, err)
	return data
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Sigstore is a key pair of cosign.
type Sigstore struct {
	PublicPEM []byte
	signer    signature.Signer
}

// NewSigstore makes a key pair.
func NewSigstore(t testing.TB) *Sigstore {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	public, err := cryptoutils.MarshalPublicKeyToPEM(key.Public())
	must(t, err)
	signer, err := signature.LoadECDSASigner(key, crypto.SHA256)
	must(t, err)
	return &Sigstore{public, signer}
}

// Media type and annotation of a cosign signature.
const (
	MediaType  = "application/vnd.dev.cosign.simplesigning.v1+json"
	annotation = "dev.cosignproject.cosign/signature"
)

// Sign returns a signature's payload and annotations for an image name without tag.
func (k *Sigstore) Sign(t testing.TB, name string, d digest.Digest) (data []byte, annotations map[string]string) {
	t.Helper()
	data = payload(t, "cosign container image signature", name, d)
	sum, err := k.signer.SignMessage(bytes.NewReader(data))
	must(t, err)
	return data, map[string]string{annotation: base64.StdEncoding.EncodeToString(sum)}
}

// Attach stores a signature under cosign's tag in a registry. name is the image's name without tag.
func (k *Sigstore) Attach(t testing.TB, reg *registrytest.Server, repository, name string, d digest.Digest) {
	t.Helper()
	data, annotations := k.Sign(t, name, d)
	layer := reg.PutBlob(repository, data)
	layer.MediaType, layer.Annotations = MediaType, annotations
	config := reg.PutBlob(repository, []byte("{}"))
	config.MediaType = ocispec.MediaTypeImageConfig
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageManifest, "config": config, "layers": []ocispec.Descriptor{layer},
	})
	must(t, err)
	reg.PutManifest(repository, fmt.Sprintf("%s-%s.sig", d.Algorithm(), d.Encoded()), ocispec.MediaTypeImageManifest, manifest)
}

// OpenPGP is a key pair of GPG.
type OpenPGP struct {
	Public []byte
	entity *openpgp.Entity
}

// NewOpenPGP makes a key pair.
func NewOpenPGP(t testing.TB) *OpenPGP {
	t.Helper()
	entity, err := openpgp.NewEntity("test", "", "test@example.com", nil)
	must(t, err)
	var public bytes.Buffer
	must(t, entity.Serialize(&public))
	return &OpenPGP{public.Bytes(), entity}
}

// Sign returns a signature for an image name with tag.
func (k *OpenPGP) Sign(t testing.TB, name string, d digest.Digest) []byte {
	t.Helper()
	var signed bytes.Buffer
	w, err := openpgp.Sign(&signed, k.entity, nil, nil)
	must(t, err)
	_, err = w.Write(payload(t, "atomic container signature", name, d))
	must(t, err)
	must(t, w.Close())
	return signed.Bytes()
}
