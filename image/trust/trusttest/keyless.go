package trusttest

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"math/big"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
)

// Keyless is a certificate authority like Fulcio, with a log like Rekor. It makes signatures like
// `cosign sign` without a key.
type Keyless struct {
	RootPEM []byte // certificate of the authority
	LogPEM  []byte // public key of the log

	chain   []byte // of the intermediate authority that issues certificates, and the root
	issuer  *x509.Certificate
	key     *ecdsa.PrivateKey // of issuer
	logKey  *ecdsa.PrivateKey
	started time.Time
}

// Identity is a person who signs.
type Identity struct {
	Issuer string // the provider that authenticated the person
	Email  string
	Late   time.Duration // time of the log entry after the certificate was issued
}

// lifetime is the validity of a signer's certificate, as of Fulcio's.
const lifetime = 10 * time.Minute

// issuerID is the extension with the provider (1.3.6.1.4.1.57264.1.8).
var issuerID = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57264, 1, 8}

// NewKeyless makes an authority and a log.
func NewKeyless(t testing.TB) *Keyless {
	t.Helper()
	k := &Keyless{started: time.Now().Add(-time.Hour), logKey: newKey(t)}
	rootKey := newKey(t)
	root := k.certificate(t, authority("root"), nil, rootKey.Public(), rootKey)
	k.key = newKey(t)
	k.issuer = k.certificate(t, authority("intermediate"), root, k.key.Public(), rootKey)
	var err error
	k.RootPEM, err = cryptoutils.MarshalCertificateToPEM(root)
	must(t, err)
	k.chain, err = cryptoutils.MarshalCertificatesToPEM([]*x509.Certificate{k.issuer, root})
	must(t, err)
	k.LogPEM, err = cryptoutils.MarshalPublicKeyToPEM(k.logKey.Public())
	must(t, err)
	return k
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	return key
}

func authority(name string) *x509.Certificate {
	return &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign,
	}
}

// certificate signs a certificate. Without a parent it is self-signed.
func (k *Keyless) certificate(t testing.TB, c, parent *x509.Certificate, public crypto.PublicKey,
	by *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	var err error
	c.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62))
	must(t, err)
	c.NotBefore = k.started
	if parent == nil {
		parent = c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, public, by)
	must(t, err)
	signed, err := x509.ParseCertificate(der)
	must(t, err)
	return signed
}

// Sign returns a signature's payload and annotations for an image name without tag.
func (k *Keyless) Sign(t testing.TB, who Identity, name string, d digest.Digest) (data []byte, annotations map[string]string) {
	t.Helper()
	key := newKey(t)
	provider, err := asn1.MarshalWithParams(who.Issuer, "utf8")
	must(t, err)
	leaf, err := cryptoutils.MarshalCertificateToPEM(k.certificate(t, &x509.Certificate{
		NotAfter:        k.started.Add(lifetime),
		KeyUsage:        x509.KeyUsageDigitalSignature,
		ExtKeyUsage:     []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning},
		EmailAddresses:  []string{who.Email},
		ExtraExtensions: []pkix.Extension{{Id: issuerID, Value: provider}},
	}, k.issuer, key.Public(), k.key))
	must(t, err)
	signer, err := signature.LoadECDSASigner(key, crypto.SHA256)
	must(t, err)
	data = payload(t, "cosign container image signature", name, d)
	sum, err := signer.SignMessage(bytes.NewReader(data))
	must(t, err)
	return data, map[string]string{
		annotation:                        base64.StdEncoding.EncodeToString(sum),
		"dev.sigstore.cosign/certificate": string(leaf),
		"dev.sigstore.cosign/chain":       string(k.chain),
		"dev.sigstore.cosign/bundle":      k.logEntry(t, data, sum, leaf, k.started.Add(who.Late)),
	}
}

// logEntry returns the log's signed entry of a signature.
func (k *Keyless) logEntry(t testing.TB, data, sum, certificate []byte, at time.Time) string {
	t.Helper()
	hash := sha256.Sum256(data)
	body := encode(t, map[string]any{"apiVersion": "0.0.1", "kind": "hashedrekord", "spec": map[string]any{
		"data":      map[string]any{"hash": map[string]string{"algorithm": "sha256", "value": hex.EncodeToString(hash[:])}},
		"signature": map[string]any{"content": sum, "publicKey": map[string]any{"content": certificate}},
	}})
	// A map's keys are sorted, so this is canonical JSON.
	entry := encode(t, map[string]any{"body": body, "integratedTime": at.Unix(), "logID": "log", "logIndex": 1})
	entryHash := sha256.Sum256(entry)
	promise, err := ecdsa.SignASN1(rand.Reader, k.logKey, entryHash[:])
	must(t, err)
	return string(encode(t, map[string]any{"SignedEntryTimestamp": promise, "Payload": json.RawMessage(entry)}))
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	must(t, err)
	return data
}
