package registry

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/registry/registrytest"
)

// putSignature stores a signature without content under cosign's tag.
func putSignature(t *testing.T, reg *registrytest.Server, repo string, of ocispec.Descriptor) {
	t.Helper()
	layer, config := reg.PutBlob(repo, []byte("payload")), reg.PutBlob(repo, []byte("{}"))
	layer.MediaType, config.MediaType = cosignSimpleSigning, ocispec.MediaTypeImageConfig
	manifest, err := json.Marshal(map[string]any{"schemaVersion": 2, "config": config, "layers": []ocispec.Descriptor{layer}})
	if err != nil {
		t.Fatal(err)
	}
	reg.PutManifest(repo, "sha256-"+of.Digest.Encoded()+".sig", ocispec.MediaTypeImageManifest, manifest)
}

// Registries without the referrers API answer in many ways. Cosign's tag is read nevertheless. A
// registry that cannot answer now is no such registry.
func TestAttachmentsWithoutReferrersAPI(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	top := putImage(reg, "app", "v1", []byte("x"))
	putSignature(t, reg, "app", top)
	var status int
	var body string
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/referrers/") {
			return false
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
		return true
	}
	for _, tc := range []struct {
		status int
		body   string
		fails  bool
	}{
		{400, "", false}, {403, "", false}, {404, "", false}, {405, "", false}, {406, "", false}, {501, "", false},
		{200, "<html>Please log in</html>", false}, {200, `{"schemaVersion":2,"manifests":[]}`, false}, {200, `{"repositories":[]}`, false},
		{429, "", true}, {500, "", true}, {503, "", true},
	} {
		t.Run(fmt.Sprint(tc.status, tc.body), func(t *testing.T) {
			status, body = tc.status, tc.body
			list, err := open(t, Config{}, reg.Host()+"/app:v1", Credentials{}).Attachments(t.Context(), top.Digest)
			if (err != nil) != tc.fails || !tc.fails && len(list) != 1 {
				t.Errorf("%d signatures, %v", len(list), err)
			}
		})
	}
}
