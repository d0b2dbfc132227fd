package integration

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image/profile"
	"berth/image/registry/registrytest"
	"berth/integration/harness"
)

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
	pull := func(ref string) (*runtimeapi.PullSecurityProfileResponse, error) {
		return d.Images.PullSecurityProfile(t.Context(), &runtimeapi.ImageSpec{Image: ref, UserSpecifiedImage: ref}, nil,
			&runtimeapi.PodSandboxConfig{}, runtimeapi.SecurityProfileKind_Seccomp)
	}
	images := len(harness.Get(d.Images.ListImages(t.Context(), nil))(t))
	harness.Equal(t, "cached at first", harness.Get(pull(ref))(t).GetCached(), false)
	_, err := pull(refused)
	harness.WantText(t, "the refusal", err.Error(), "desc = "+crierrors.ErrSecurityProfileInvalid.Error()+": ")
	harness.Equal(t, "images", len(harness.Get(d.Images.ListImages(t.Context(), nil))(t)), images)

	d.Restart(t)
	reg.Close()
	harness.Equal(t, "cached after a restart", harness.Get(pull(ref))(t).GetCached(), true)
	_, err = pull(strings.Replace(ref, "/profile@", "/other@", 1))
	harness.WantText(t, "the error for an unreachable registry", err.Error(), crierrors.ErrRegistryUnavailable.Error()+": ")
	list := harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)
	if len(list) != 1 || len(list[0].GetRefs()) != 1 || list[0].GetRefs()[0] != ref || list[0].GetSize() == 0 {
		t.Fatalf("profiles: %v", list)
	}
	for range 2 {
		harness.Must(t, d.Images.RemoveSecurityProfile(t.Context(), list[0].GetDigest()))
	}
	harness.Equal(t, "profiles left", len(harness.Get(d.Images.ListSecurityProfiles(t.Context()))(t)), 0)
}
