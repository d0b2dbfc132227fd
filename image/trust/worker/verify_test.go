//go:build containers_image_openpgp

package worker

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/trust/trusttest"
)

const manifest = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{},"layers":[]}`

// write makes the directory of a check with one document.
func write(t *testing.T, policy, reference, document string, signatures ...[]byte) string {
	t.Helper()
	root := t.TempDir()
	for name, data := range map[string][]byte{PolicyFile: []byte(policy), ReferenceFile: []byte(reference), "0/manifest.json": []byte(document)} {
		put(t, filepath.Join(root, name), data)
	}
	for i, s := range signatures {
		put(t, filepath.Join(root, fmt.Sprintf("0/signature-%d", i+1)), s)
	}
	return root
}

func put(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// policyOf returns a policy with one requirement.
func policyOf(t *testing.T, requirement map[string]any) string {
	t.Helper()
	data, err := json.Marshal(map[string]any{"default": []any{requirement}})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func wantVerdict(t *testing.T, root, reason string) {
	t.Helper()
	switch got := verdictOf(verify(root)); {
	case reason == "" && !got.Accepted:
		t.Errorf("rejected: %s", got.Reason)
	case reason != "" && (got.Accepted || !strings.Contains(got.Reason, reason)):
		t.Errorf("got %+v; want a reason with %q", got, reason)
	}
}

func TestVerifySigstoreSignature(t *testing.T) {
	t.Parallel()
	key, other := trusttest.NewSigstore(t), trusttest.NewSigstore(t)
	policy := policyOf(t, map[string]any{"type": "sigstoreSigned", "keyData": key.PublicPEM, "signedIdentity": map[string]string{"type": "matchRepository"}})
	const name = "r.example/team/app"
	d := digest.FromString(manifest)
	sign := func(k *trusttest.Sigstore, name string, d digest.Digest) []byte {
		data, annotations := k.Sign(t, name, d)
		encoded, err := Sigstore(trusttest.MediaType, data, annotations)
		if err != nil {
			t.Fatal(err)
		}
		return encoded
	}
	good := sign(key, name, d)
	data, annotations := key.Sign(t, "r.example/team/other", d)
	tampered, err := Sigstore(trusttest.MediaType, []byte(strings.Replace(string(data), "other", "app", 1)), annotations)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, document, reference, reason string
		signatures                        [][]byte
	}{
		{"good", manifest, name + ":v1", "", [][]byte{good}},
		{"good beside bad", manifest, name + ":v1", "", [][]byte{sign(other, name, d), good}},
		{"by digest", manifest, name + "@" + d.String(), "", [][]byte{good}},
		{"none", manifest, name + ":v1", "signature was required", nil},
		{"other key", manifest, name + ":v1", "cryptographic signature verification failed", [][]byte{sign(other, name, d)}},
		{"other image", manifest, name + ":v1", "not accepted", [][]byte{sign(key, "r.example/team/other", d)}},
		{"other digest", manifest + " ", name + ":v1", "does not match", [][]byte{good}},
		{"changed payload", manifest, name + ":v1", "cryptographic signature verification failed", [][]byte{tampered}},
		{"no signature file", manifest, name + ":v1", "unrecognized signature format", [][]byte{[]byte("x")}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			wantVerdict(t, write(t, policy, tc.reference, tc.document, tc.signatures...), tc.reason)
		})
	}
}

// A keyless signature counts if the authority certified the person, and the log has the signature
// of the time in which the certificate was valid.
func TestVerifyKeylessSignature(t *testing.T) {
	t.Parallel()
	k, other := trusttest.NewKeyless(t), trusttest.NewKeyless(t)
	const name = "r.example/team/app"
	who := trusttest.Identity{Issuer: "https://accounts.example", Email: "dev@team.example", Late: time.Minute}
	policy := policyOf(t, map[string]any{
		"type":               "sigstoreSigned",
		"fulcio":             map[string]any{"caData": k.RootPEM, "oidcIssuer": who.Issuer, "subjectEmail": who.Email},
		"rekorPublicKeyData": k.LogPEM,
		"signedIdentity":     map[string]string{"type": "matchRepository"},
	})
	d := digest.FromString(manifest)
	for _, tc := range []struct {
		name, reason string
		by           *trusttest.Keyless
		who          func(*trusttest.Identity)
		change       func(annotations, others map[string]string)
	}{
		{"good", "", k, nil, nil},
		{"another person", "Required email", k, func(w *trusttest.Identity) { w.Email = "other@team.example" }, nil},
		{"another provider", "OIDC issuer", k, func(w *trusttest.Identity) { w.Issuer = "https://other.example" }, nil},
		{"after the certificate's lifetime", "certificate has expired", k, func(w *trusttest.Identity) { w.Late = time.Hour }, nil},
		{"before it", "certificate has expired or is not yet valid", k, func(w *trusttest.Identity) { w.Late = -time.Hour }, nil},
		{"another authority and log", "verification of Rekor SET failed", other, nil, nil},
		{"another log", "verification of Rekor SET failed", k, nil, func(a, others map[string]string) {
			a["dev.sigstore.cosign/bundle"] = others["dev.sigstore.cosign/bundle"]
		}},
		{"no log entry", "missing dev.sigstore.cosign/bundle", k, nil, func(a, _ map[string]string) {
			delete(a, "dev.sigstore.cosign/bundle")
		}},
		{"another certificate", "publicKey in Rekor SET does not match", k, nil, func(a, others map[string]string) {
			a["dev.sigstore.cosign/certificate"] = others["dev.sigstore.cosign/certificate"]
		}},
		{"another signature", "signature in Rekor SET does not match", k, nil, func(a, others map[string]string) {
			a["dev.cosignproject.cosign/signature"] = others["dev.cosignproject.cosign/signature"]
		}},
		{"no intermediate certificate", "unknown authority", k, nil, func(a, _ map[string]string) {
			delete(a, "dev.sigstore.cosign/chain")
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			signer := who
			if tc.who != nil {
				tc.who(&signer)
			}
			data, annotations := tc.by.Sign(t, signer, name, d)
			if tc.change != nil {
				_, others := other.Sign(t, who, name, d)
				tc.change(annotations, others)
			}
			encoded, err := Sigstore(trusttest.MediaType, data, annotations)
			if err != nil {
				t.Fatal(err)
			}
			wantVerdict(t, write(t, policy, name+":v1", manifest, encoded), tc.reason)
		})
	}
}

func TestVerifyOpenPGPSignature(t *testing.T) {
	t.Parallel()
	key, other := trusttest.NewOpenPGP(t), trusttest.NewOpenPGP(t)
	policy := policyOf(t, map[string]any{"type": "signedBy", "keyType": "GPGKeys", "keyData": key.Public})
	d := digest.FromString(manifest)
	const name = "r.example/team/app:v1"
	tampered := key.Sign(t, name, d)
	tampered[len(tampered)/2] ^= 1
	for _, tc := range []struct {
		name, document, reason string
		signature              []byte
	}{
		{"good", manifest, "", key.Sign(t, name, d)},
		{"other key", manifest, "Key not found", other.Sign(t, name, d)},
		{"other digest", manifest + " ", "does not match", key.Sign(t, name, d)},
		{"other tag", manifest, "not accepted", key.Sign(t, "r.example/team/app:v2", d)},
		{"changed bytes", manifest, " ", tampered},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			wantVerdict(t, write(t, policy, name, tc.document, tc.signature), tc.reason)
		})
	}
}

// TestVerifyAcceptsSignedIndex checks that a signature of the index is enough.
func TestVerifyAcceptsSignedIndex(t *testing.T) {
	t.Parallel()
	key := trusttest.NewOpenPGP(t)
	policy := policyOf(t, map[string]any{"type": "signedBy", "keyType": "GPGKeys", "keyData": key.Public})
	const index, name = `{"schemaVersion":2,"manifests":[]}`, "r.example/app:v1"
	root := write(t, policy, name, index, key.Sign(t, name, digest.FromString(index)))
	put(t, filepath.Join(root, "1/manifest.json"), []byte(manifest))
	wantVerdict(t, root, "")
	if err := os.Remove(filepath.Join(root, "0/signature-1")); err != nil {
		t.Fatal(err)
	}
	wantVerdict(t, root, "signature was required")
}

func TestVerifyRejectsBrokenInput(t *testing.T) {
	t.Parallel()
	const accept = `{"default":[{"type":"insecureAcceptAnything"}]}`
	for name, root := range map[string]string{
		"policy":    write(t, `{"default":[{"type":"unknown"}]}`, "r.example/app:v1", manifest),
		"empty":     write(t, `{"default":[]}`, "r.example/app:v1", manifest),
		"reference": write(t, accept, "UPPER/app", manifest),
		"nothing":   t.TempDir(),
	} {
		if got := verdictOf(verify(root)); got.Accepted || got.Reason == "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	wantVerdict(t, write(t, accept, "r.example/app:v1", manifest), "")
}

// FuzzVerify checks that no document or signature is accepted for a key that has signed nothing.
func FuzzVerify(f *testing.F) {
	sigstore, gpg := trusttest.NewSigstore(f), trusttest.NewOpenPGP(f)
	policies := make([]string, 2)
	for i, requirement := range []map[string]any{
		{"type": "sigstoreSigned", "keyData": sigstore.PublicPEM}, {"type": "signedBy", "keyType": "GPGKeys", "keyData": gpg.Public},
	} {
		data, err := json.Marshal(map[string]any{"default": []any{requirement}})
		if err != nil {
			f.Fatal(err)
		}
		policies[i] = string(data)
	}
	data, annotations := trusttest.NewSigstore(f).Sign(f, "r.example/app", digest.FromString(manifest))
	encoded, err := Sigstore(trusttest.MediaType, data, annotations)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(manifest, encoded)
	f.Add(manifest, trusttest.NewOpenPGP(f).Sign(f, "r.example/app:v1", digest.FromString(manifest)))
	f.Add("", []byte{0})
	f.Fuzz(func(t *testing.T, document string, signature []byte) {
		for _, policy := range policies {
			if verify(write(t, policy, "r.example/app:v1", document, signature)) == nil {
				t.Fatalf("accepted %q with %q", document, signature)
			}
		}
	})
}
