package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/trust/trusttest"
	"berth/integration/fixture"
	"berth/integration/harness"
)

const signatureRejected = "SignatureValidationFailed"

// signImage stores a cosign signature of an image beside it.
func signImage(t *testing.T, r *fixture.Registry, key *trusttest.Sigstore, repository, of string, img v1.Image) {
	t.Helper()
	d := digest.Digest(harness.DigestOf(t, img))
	data, annotations := key.Sign(t, r.Host+"/"+of, d)
	signature := harness.Get(mutate.Append(empty.Image,
		mutate.Addendum{Layer: static.NewLayer(data, types.MediaType(trusttest.MediaType)), Annotations: annotations}))(t)
	harness.Push(t, r, fmt.Sprintf("%s:sha256-%s.sig", repository, d.Encoded()), signature)
}

// writePolicy writes a policy.json with requirements of scopes of registries.
func writePolicy(t *testing.T, path, byDefault string, scopes map[string]any) {
	t.Helper()
	docker := map[string]any{}
	for scope, requirement := range scopes {
		docker[scope] = []any{requirement}
	}
	data := harness.Get(json.Marshal(map[string]any{"default": []any{map[string]string{"type": byDefault}},
		"transports": map[string]any{"docker": docker}}))(t)
	harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	harness.Must(t, os.WriteFile(path, data, 0o644))
}

// sigstoreSigned requires a signature of a key, which it stores in dir.
func sigstoreSigned(t *testing.T, dir string, key *trusttest.Sigstore) map[string]any {
	t.Helper()
	file := filepath.Join(dir, "cosign.pub")
	harness.Must(t, os.WriteFile(file, key.PublicPEM, 0o644))
	return map[string]any{"type": "sigstoreSigned", "keyPath": file, "signedIdentity": map[string]string{"type": "matchRepository"}}
}

func wantRejected(t *testing.T, err error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), signatureRejected) {
		t.Errorf("got %v; want %s", err, signatureRejected)
	}
}

func podInNamespace(namespace string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = namespace }
}

func withImage(name string) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Image = &runtimeapi.ImageSpec{Image: name} }
}

// TestSignaturePolicy checks pulls and creations of signed, unsigned and wrongly signed images.
func TestSignaturePolicy(t *testing.T) {
	dir, key := t.TempDir(), trusttest.NewSigstore(t)
	r := harness.NewRegistry(t)
	build := func(content string) v1.Image {
		return harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("content", 0o644, content)})
	}
	signed, moved, unsigned := build("signed"), build("moved"), build("unsigned")
	good, _ := harness.Push(t, r, "team/good:v1", signed)
	other, _ := harness.Push(t, r, "team/moved:v1", moved)
	bad, _ := harness.Push(t, r, "team/bad:v1", unsigned)
	signImage(t, r, key, "team/good", "team/good", signed)
	signImage(t, r, key, "team/moved", "team/elsewhere", moved)
	policy := filepath.Join(dir, "policy.json")
	require := map[string]any{r.Host + "/team": sigstoreSigned(t, dir, key)}
	writePolicy(t, policy, "insecureAcceptAnything", require)
	writePolicy(t, filepath.Join(dir, "policy.d/free.json"), "insecureAcceptAnything", nil)
	writePolicy(t, filepath.Join(dir, "policy.d/closed.json"), "reject", nil)
	d := harness.StartDaemon(t, harness.WithConfig(
		fmt.Sprintf("signature.policy = %q", policy), fmt.Sprintf("signature.policy_dir = %q", filepath.Join(dir, "policy.d"))))
	pullFor := func(namespace, name string) error {
		pod := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: namespace, Uid: "u"}}
		_, err := d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: name}, nil, pod)
		return err
	}
	harness.Must(t, pullFor("default", good))
	harness.Must(t, pullFor("default", good)) // again: the image is unchanged
	wantRejected(t, pullFor("default", bad))
	wantRejected(t, pullFor("default", other))
	wantRejected(t, pullFor("closed", good))
	harness.Must(t, pullFor("free", bad))
	if d.ImageStatus(t, other) != nil {
		t.Error("a rejected image was stored")
	}

	pod, free, closed := d.RunPod(t), d.RunPod(t, podInNamespace("free")), d.RunPod(t, podInNamespace("closed"))
	pod.Run(t, withImage(good))
	free.Run(t, withImage(bad))
	_, err := pod.TryCreate(t, withImage(bad)) // pulled under the policy of another namespace
	wantRejected(t, err)
	_, err = closed.TryCreate(t, withImage(good))
	wantRejected(t, err)

	d.Restart(t) // the evidence is on disk
	pod.Run(t, withImage(good))
	writePolicy(t, policy, "insecureAcceptAnything", map[string]any{r.Host + "/team": sigstoreSigned(t, dir, trusttest.NewSigstore(t))})
	_, err = pod.TryCreate(t, withImage(good)) // the key was replaced
	wantRejected(t, err)
	harness.Must(t, os.WriteFile(policy, []byte(`{"default": [{"type": "insecureAcceptAnything"}], "transport": {}}`), 0o644))
	_, err = pod.TryCreate(t, withImage(good)) // the policy is invalid
	wantRejected(t, err)
}

// An image with two names, which namespaces need with signatures of different kinds, stays usable
// for all of them without further pulls.
func TestSignaturesOfAllPullsAreKept(t *testing.T) {
	dir, key, gpg := t.TempDir(), trusttest.NewSigstore(t), trusttest.NewOpenPGP(t)
	r := harness.NewRegistry(t)
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("content", 0o644, "shared")})
	name, _ := harness.Push(t, r, "team/app:v1", img)
	other, _ := harness.Push(t, r, "mirror/app:v1", img)
	signImage(t, r, key, "team/app", "team/app", img)
	signImage(t, r, key, "mirror/app", "mirror/app", img)
	hash := digest.Digest(harness.DigestOf(t, img))
	lookaside := filepath.Join(dir, "store", fmt.Sprintf("team/app@sha256=%s", hash.Encoded()), "signature-1")
	harness.Must(t, os.MkdirAll(filepath.Dir(lookaside), 0o755))
	harness.Must(t, os.WriteFile(lookaside, gpg.Sign(t, name, hash), 0o644))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "lookaside.yaml"),
		fmt.Appendf(nil, "docker:\n  %s:\n    lookaside: file://%s/store\n", r.Host, dir), 0o644))
	file := filepath.Join(dir, "key.gpg")
	harness.Must(t, os.WriteFile(file, gpg.Public, 0o644))

	policy, policies := filepath.Join(dir, "policy.json"), filepath.Join(dir, "policy.d")
	writePolicy(t, policy, "insecureAcceptAnything", nil)
	writePolicy(t, filepath.Join(policies, "cosign.json"), "reject", map[string]any{r.Host: sigstoreSigned(t, dir, key)})
	writePolicy(t, filepath.Join(policies, "gpg.json"), "reject",
		map[string]any{r.Host: map[string]any{"type": "signedBy", "keyType": "GPGKeys", "keyPath": file}})
	d := harness.StartDaemon(t, harness.WithConfig(
		fmt.Sprintf("signature.policy = %q", policy), fmt.Sprintf("signature.policy_dir = %q", policies),
		fmt.Sprintf("signature.registries_dir = %q", dir)))
	d.Pull(t, name) // for a namespace that needs no signatures
	cosign, openPGP := d.RunPod(t, podInNamespace("cosign")), d.RunPod(t, podInNamespace("gpg"))
	cosign.Run(t, withImage(name))
	openPGP.Run(t, withImage(name))
	d.Pull(t, other)
	d.Restart(t) // the evidence is on disk
	cosign.Run(t, withImage(other))
	cosign.Run(t, withImage(name))
	openPGP.Run(t, withImage(name))
}

// Keyless signatures are found as OCI referrers: by the registry's API, and by the tag that stands
// in for it in older registries.
func TestKeylessSignatureFromReferrers(t *testing.T) {
	dir, keyless := t.TempDir(), trusttest.NewKeyless(t)
	who := trusttest.Identity{Issuer: "https://accounts.example", Email: "dev@team.example", Late: time.Minute}
	r := harness.NewRegistry(t)
	policy := filepath.Join(dir, "policy.json")
	ca, log := filepath.Join(dir, "fulcio.pem"), filepath.Join(dir, "rekor.pub")
	harness.Must(t, os.WriteFile(ca, keyless.RootPEM, 0o644))
	harness.Must(t, os.WriteFile(log, keyless.LogPEM, 0o644))
	writePolicy(t, policy, "reject", map[string]any{r.Host: map[string]any{
		"type":               "sigstoreSigned",
		"fulcio":             map[string]any{"caPath": ca, "oidcIssuer": who.Issuer, "subjectEmail": who.Email},
		"rekorPublicKeyPath": log,
		"signedIdentity":     map[string]string{"type": "matchRepository"},
	}})
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("signature.policy = %q", policy)))
	for _, tt := range []struct {
		repository string
		who        trusttest.Identity
		api        bool
	}{
		{"api/good", who, true},
		{"api/other", trusttest.Identity{Issuer: who.Issuer, Email: "other@team.example"}, true},
		{"tag/good", who, false},
	} {
		t.Run(tt.repository, func(t *testing.T) {
			img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("content", 0o644, tt.repository)})
			name, _ := harness.Push(t, r, tt.repository+":v1", img)
			_, err := d.TryPull(t, name, nil)
			wantRejected(t, err)
			index := referrersOf(t, r, tt.repository, img, func(of digest.Digest) ([]byte, map[string]string) {
				return keyless.Sign(t, tt.who, r.Host+"/"+tt.repository, of)
			})
			of := digest.Digest(harness.DigestOf(t, img))
			if tt.api {
				serveReferrers(t, r, tt.repository, of, index)
			} else {
				putIndex(t, r, tt.repository, "sha256-"+of.Encoded(), index)
			}
			_, err = d.TryPull(t, name, nil)
			if tt.who == who {
				harness.Must(t, err)
			} else {
				wantRejected(t, err)
			}
		})
	}
}

// An image whose only signature is a sigstore bundle, the default of cosign 3, is rejected with the
// way out.
func TestSignatureBundleIsNamed(t *testing.T) {
	dir, r := t.TempDir(), harness.NewRegistry(t)
	policy, key := filepath.Join(dir, "policy.json"), trusttest.NewSigstore(t)
	writePolicy(t, policy, "reject", map[string]any{r.Host: sigstoreSigned(t, dir, key)})
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("signature.policy = %q", policy)))
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("content", 0o644, "bundle")})
	name, _ := harness.Push(t, r, "bundle/app:v1", img)
	index := harness.Get(json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": types.OCIImageIndex, "manifests": []any{map[string]any{
		"mediaType": types.OCIManifestSchema1, "digest": harness.DigestOf(t, img), "size": 7,
		"artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json",
	}}}))(t)
	putIndex(t, r, "bundle/app", strings.Replace(harness.DigestOf(t, img), ":", "-", 1), index)
	_, err := d.TryPull(t, name, nil)
	wantRejected(t, err)
	harness.WantText(t, "reason", err.Error(), "bundle.v0.3+json", "cosign sign --new-bundle-format=false")
}

// referrersOf stores a signature of an image and returns the index with the image's referrers.
func referrersOf(t *testing.T, r *fixture.Registry, repository string, img v1.Image,
	sign func(digest.Digest) ([]byte, map[string]string)) []byte {
	t.Helper()
	data, annotations := sign(digest.Digest(harness.DigestOf(t, img)))
	signature := harness.Get(mutate.Append(empty.Image,
		mutate.Addendum{Layer: static.NewLayer(data, types.MediaType(trusttest.MediaType)), Annotations: annotations}))(t)
	harness.Push(t, r, repository+":signature", signature)
	descriptor := func(artifact string) map[string]any {
		return map[string]any{
			"mediaType": types.DockerManifestSchema2, "digest": harness.DigestOf(t, signature),
			"size": harness.Get(signature.Size())(t), "artifactType": artifact,
		}
	}
	return harness.Get(json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": types.OCIImageIndex,
		"manifests": []any{descriptor("application/spdx+json"), descriptor("application/vnd.dev.cosign.artifact.sig.v1+json")},
	}))(t)
}

// serveReferrers makes the registry answer the referrers API for one image.
func serveReferrers(t *testing.T, r *fixture.Registry, repository string, of digest.Digest, index []byte) {
	t.Helper()
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if req.URL.Path != "/v2/"+repository+"/referrers/"+of.String() {
			return false
		}
		w.Header().Set("Content-Type", string(types.OCIImageIndex))
		_, _ = w.Write(index) // a broken connection fails the pull
		return true
	})
	t.Cleanup(func() { r.Hook(nil) })
}

// putIndex stores an index under a tag.
func putIndex(t *testing.T, r *fixture.Registry, repository, tag string, index []byte) {
	t.Helper()
	url := fmt.Sprintf("http://%s/v2/%s/manifests/%s", r.Host, repository, tag)
	req := harness.Get(http.NewRequestWithContext(t.Context(), http.MethodPut, url, bytes.NewReader(index)))(t)
	req.Header.Set("Content-Type", string(types.OCIImageIndex))
	resp := harness.Get(http.DefaultClient.Do(req))(t)
	defer resp.Body.Close()
	harness.Equal(t, "status of the upload", resp.StatusCode, http.StatusCreated)
}

// TestOpenPGPSignature checks signatures of a lookaside store.
func TestOpenPGPSignature(t *testing.T) {
	dir, key := t.TempDir(), trusttest.NewOpenPGP(t)
	r := harness.NewRegistry(t)
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("content", 0o644, "gpg")})
	name, _ := harness.Push(t, r, "gpg/app:v1", img)
	file := filepath.Join(dir, "key.gpg")
	harness.Must(t, os.WriteFile(file, key.Public, 0o644))
	policy := filepath.Join(dir, "policy.json")
	writePolicy(t, policy, "reject", map[string]any{r.Host: map[string]any{"type": "signedBy", "keyType": "GPGKeys", "keyPath": file}})
	harness.Must(t, os.WriteFile(filepath.Join(dir, "lookaside.yaml"),
		fmt.Appendf(nil, "docker:\n  %s:\n    lookaside: file://%s/store\n", r.Host, dir), 0o644))
	d := harness.StartDaemon(t, harness.WithConfig(
		fmt.Sprintf("signature.policy = %q", policy), fmt.Sprintf("signature.registries_dir = %q", dir)))
	_, err := d.TryPull(t, name, nil)
	wantRejected(t, err)
	hash := digest.Digest(harness.DigestOf(t, img))
	signature := filepath.Join(dir, "store", fmt.Sprintf("gpg/app@sha256=%s", hash.Encoded()), "signature-1")
	harness.Must(t, os.MkdirAll(filepath.Dir(signature), 0o755))
	harness.Must(t, os.WriteFile(signature, key.Sign(t, name, digest.FromString("other")), 0o644))
	_, err = d.TryPull(t, name, nil)
	wantRejected(t, err)
	harness.Must(t, os.WriteFile(signature, key.Sign(t, name, hash), 0o644))
	d.Pull(t, name)
}

// TestVerifierPlugins checks that plugins in containerd's protocol decide about pulls.
func TestVerifierPlugins(t *testing.T) {
	dir := t.TempDir()
	r := harness.NewRegistry(t)
	name, _ := harness.Push(t, r, "plugin/app:v1", harness.BuildImage(t, v1.Config{}))
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("signature.plugin_dir = %q", dir), `signature.plugin_timeout = "2s"`))
	plugin := filepath.Join(dir, "check")
	install := func(script string) {
		t.Helper()
		harness.Must(t, os.WriteFile(plugin+".new", []byte("#!/bin/sh\n"+script+"\n"), 0o755))
		harness.Must(t, os.Rename(plugin+".new", plugin))
	}
	const protocol = `[ "$1 $3 $5 $6" = "-name -digest -stdin-media-type application/vnd.oci.descriptor.v1+json" ] || exit 3
grep -q "\"digest\":\"$4\"" || exit 4
case $2 in */plugin/app:v1) ;; *) exit 5;; esac
`
	for _, tc := range []struct{ name, script, reason string }{
		{"rejects", protocol + "echo because of a test; exit 1", "because of a test"},
		{"hangs", "sleep 60", "no answer within"},
		{"accepts", protocol + "echo fine", ""},
		{"rejects an image of the node", "exit 1", "check"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			install(tc.script)
			_, err := d.TryPull(t, name, nil)
			if tc.reason == "" {
				harness.Must(t, err)
				return
			}
			wantRejected(t, err)
			if err != nil && !strings.Contains(err.Error(), tc.reason) {
				t.Errorf("%v; want a text with %q", err, tc.reason)
			}
		})
	}
}
