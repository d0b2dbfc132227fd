package integration

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image/profile"
	"berth/image/registry/registrytest"
	"berth/image/trust/trusttest"
	"berth/integration/fixture"
	"berth/integration/harness"
)

// pullProfile pulls a security profile for a pod in a namespace, as kubelet does.
func pullProfile(t *testing.T, d *harness.Daemon, namespace, ref string, auth *runtimeapi.AuthConfig) (cached bool, err error) {
	t.Helper()
	pod := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: namespace, Uid: "u"}}
	resp, err := d.Images.PullSecurityProfile(t.Context(), &runtimeapi.ImageSpec{Image: ref, UserSpecifiedImage: ref}, auth,
		pod, runtimeapi.SecurityProfileKind_Seccomp)
	return resp.GetCached(), err
}

// wantPrefix checks that the text of an error begins with a well-known prefix.
func wantPrefix(t *testing.T, err, prefix error) {
	t.Helper()
	if !strings.HasPrefix(status.Convert(err).Message(), prefix.Error()+": ") {
		t.Errorf("got %v; want the prefix %s", err, prefix)
	}
}

// pushProfile pushes a profile, which differs by its error number, and returns its reference.
func pushProfile(t *testing.T, r *fixture.Registry, repository string, number int) (ref string, artifact v1.Image) {
	t.Helper()
	artifact = harness.Get(fixture.SecurityProfile(fmt.Sprintf(`{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":%d}`, number)))(t)
	harness.Push(t, r, repository+":v1", artifact)
	return r.Host + "/" + repository + "@" + harness.DigestOf(t, artifact), artifact
}

// Security profiles (KEP-6061) are pulled once, are no images, and outlive the daemon and the
// registry.
func TestSecurityProfiles(t *testing.T) {
	reg := registrytest.New(t)
	put := func(repo, content string) string {
		top := reg.PutArtifact(repo, "v1", profile.MediaType, registrytest.File{Content: []byte(content)})
		return reg.Host() + "/" + repo + "@" + top.Digest.String()
	}
	ref := put("profile", `{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`)
	refused := put("refused", `{"defaultAction":"SCMP_ACT_NOTIFY"}`)
	d := harness.StartDaemon(t)
	pull := func(ref string) (bool, error) { return pullProfile(t, d, "", ref, nil) }
	images := len(harness.Get(d.Images.ListImages(t.Context(), nil))(t))
	harness.Equal(t, "cached at first", harness.Get(pull(ref))(t), false)
	_, err := pull(refused)
	wantPrefix(t, err, crierrors.ErrSecurityProfileInvalid)
	harness.Equal(t, "images", len(harness.Get(d.Images.ListImages(t.Context(), nil))(t)), images)

	d.Restart(t)
	reg.Close()
	harness.Equal(t, "cached after a restart", harness.Get(pull(ref))(t), true)
	_, err = pull(strings.Replace(ref, "/profile@", "/other@", 1))
	wantPrefix(t, err, crierrors.ErrRegistryUnavailable)
	list := harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)
	if len(list) != 1 || len(list[0].GetRefs()) != 1 || list[0].GetRefs()[0] != ref || list[0].GetSize() == 0 {
		t.Fatalf("profiles: %v", list)
	}
	for range 2 {
		harness.Must(t, d.Images.RemoveSecurityProfile(t.Context(), list[0].GetDigest()))
	}
	harness.Equal(t, "profiles left", len(harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)), 0)
}

// The policy of the pod's namespace decides about a profile. A present profile costs no request if
// the policy accepts what an earlier pull has verified. Otherwise it is pulled and checked again.
func TestSecurityProfileSignatures(t *testing.T) {
	dir, key := t.TempDir(), trusttest.NewSigstore(t)
	r := harness.NewRegistry(t)
	signed, artifact := pushProfile(t, r, "team/signed", 1)
	signImage(t, r, key, "team/signed", "team/signed", artifact)
	unsigned, _ := pushProfile(t, r, "team/unsigned", 2)
	policy := filepath.Join(dir, "policy.json")
	writePolicy(t, policy, "insecureAcceptAnything", map[string]any{r.Host + "/team": sigstoreSigned(t, dir, key)})
	writePolicy(t, filepath.Join(dir, "policy.d/free.json"), "insecureAcceptAnything", nil)
	writePolicy(t, filepath.Join(dir, "policy.d/other.json"), "reject",
		map[string]any{r.Host: sigstoreSigned(t, t.TempDir(), trusttest.NewSigstore(t))})
	d := harness.StartDaemon(t, harness.WithConfig(
		fmt.Sprintf("signature.policy = %q", policy), fmt.Sprintf("signature.policy_dir = %q", filepath.Join(dir, "policy.d"))))
	pull := func(t *testing.T, namespace, ref string) (cached bool, requests int, err error) {
		t.Helper()
		before := r.Count("GET", "")
		cached, err = pullProfile(t, d, namespace, ref, nil)
		return cached, r.Count("GET", "") - before, err
	}
	for _, step := range []struct {
		name, namespace, ref      string
		refused, cached, restarts bool
	}{
		{name: "no policy", namespace: "free", ref: signed},
		{name: "a policy that did not apply before", namespace: "team", ref: signed},
		{name: "evidence is kept", namespace: "team", ref: signed, cached: true},
		{name: "no policy again", namespace: "free", ref: signed, cached: true},
		{name: "evidence is still kept, on disk", namespace: "team", ref: signed, cached: true, restarts: true},
		{name: "another key", namespace: "other", ref: signed, refused: true},
		{name: "the refusal removes nothing", namespace: "team", ref: signed, cached: true},
		{name: "unsigned", namespace: "team", ref: unsigned, refused: true},
		{name: "unsigned without policy", namespace: "free", ref: unsigned},
		{name: "unsigned and present", namespace: "team", ref: unsigned, refused: true},
	} {
		t.Run(step.name, func(t *testing.T) {
			if step.restarts {
				d.Restart(t)
			}
			cached, requests, err := pull(t, step.namespace, step.ref)
			if step.refused {
				wantPrefix(t, err, crierrors.ErrSignatureValidationFailed)
			} else {
				harness.Must(t, err)
			}
			harness.Equal(t, "cached", cached, step.cached)
			harness.Equal(t, "registry asked", requests > 0, !step.cached)
		})
	}
}

// The registry of a new reference checks the credentials. A present reference needs none.
func TestSecurityProfileCredentials(t *testing.T) {
	r := harness.NewRegistry(t)
	r.Hook(harness.BasicAuth)
	ref, _ := pushProfile(t, r, "private/profile", 1)
	other, _ := pushProfile(t, r, "private/other", 1)
	d := harness.StartDaemon(t)
	wrong := &runtimeapi.AuthConfig{Username: "user", Password: "wrong-password"}
	refuse := func(ref string, auth *runtimeapi.AuthConfig) {
		t.Helper()
		_, err := pullProfile(t, d, "", ref, auth)
		harness.WantCode(t, err, codes.Unauthenticated, ref)
		harness.WantNoText(t, "error", err.Error(), "wrong-password")
	}
	refuse(ref, nil)
	refuse(ref, wrong)
	right := &runtimeapi.AuthConfig{Username: "user", Password: "secret"}
	harness.Equal(t, "cached", harness.Get(pullProfile(t, d, "", ref, right))(t), false)
	harness.Equal(t, "cached without credentials", harness.Get(pullProfile(t, d, "", ref, nil))(t), true)
	refuse(other, wrong)
	list := harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)
	harness.Equal(t, "references", fmt.Sprint(list[0].GetRefs()), fmt.Sprintf("[%s]", ref))
	harness.Equal(t, "other reference", harness.Get(pullProfile(t, d, "", other, right))(t), false)
	list = harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)
	harness.Equal(t, "references", fmt.Sprint(list[0].GetRefs()), fmt.Sprintf("[%s %s]", ref, other))
}

// A mirror of hosts.toml serves a profile under the name of its registry.
func TestSecurityProfileFromMirror(t *testing.T) {
	r := harness.NewRegistry(t)
	ref, _ := pushProfile(t, r, "team/profile", 1)
	ref = strings.Replace(ref, r.Host, "registry.invalid", 1)
	d := harness.StartDaemon(t, harness.WithHosts("registry.invalid", fmt.Sprintf("server = \"https://registry.invalid\"\n[host.%q]\n[host.%q]\n",
		"http://"+harness.UnusedAddress(t), "http://"+r.Host)))
	harness.Equal(t, "cached", harness.Get(pullProfile(t, d, "", ref, nil))(t), false)
	list := harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)
	harness.Equal(t, "references", fmt.Sprint(list[0].GetRefs()), fmt.Sprintf("[%s]", ref))
}

// The command shows profiles apart from images, with each reference, and removes one.
func TestSecurityProfileCommand(t *testing.T) {
	r, d := harness.NewRegistry(t), harness.StartDaemon(t)
	var refs []string
	for _, repository := range []string{"team/one", "team/two"} {
		ref, _ := pushProfile(t, r, repository, 1)
		harness.Get(pullProfile(t, d, "", ref, nil))(t)
		refs = append(refs, ref)
	}
	harness.WantNoText(t, "images", runBerth(t, d, "image", "ls"), "team/")
	harness.WantText(t, "profiles", runBerth(t, d, "image", "profiles"), refs...)
	var list []struct {
		Digest string
		Size   uint64
		Refs   []string
	}
	harness.Must(t, json.Unmarshal([]byte(runBerth(t, d, "image", "profiles", "-o", "json")), &list))
	if len(list) != 1 || list[0].Size == 0 || !slices.Equal(list[0].Refs, refs) {
		t.Fatalf("profiles: %+v", list)
	}
	if out, err := tryBerth(d, "image", "profiles", "--rm", "0123"); err == nil || !strings.Contains(out, "0 profiles") {
		t.Errorf("removal of a missing profile: %v: %s", err, out)
	}
	runBerth(t, d, "image", "profiles", "--rm", strings.TrimPrefix(list[0].Digest, "sha256:")[:12])
	harness.Equal(t, "profiles left", runBerth(t, d, "image", "profiles", "-o", "json"), "[]\n")
}
