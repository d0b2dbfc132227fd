package registry

import (
	"fmt"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// sociJSON is a SOCI index of a type with one table, as SOCI writes it.
func sociJSON(kind, ztoc string) string {
	return fmt.Sprintf(`{"schemaVersion":2,"artifactType":%q,"config":%s,"layers":[{"mediaType":"application/vnd.amazon.soci.prefetch.v1+json",`+
		`"digest":"x"},{"mediaType":"application/octet-stream","digest":%q,"size":7,"annotations":{"com.amazon.soci.image-layer-digest":%q}}]}`,
		kind, descriptor("application/vnd.oci.empty.v1+json", sha256Of0, 2), ztoc, sha256Of1)
}

func TestParseSOCIIndex(t *testing.T) {
	got, err := parseSOCIIndex([]byte(sociJSON(sociIndexType, sha256Of0)))
	if err != nil || len(got) != 1 || got[sha256Of1].Digest != sha256Of0 || got[sha256Of1].Size != 7 {
		t.Errorf("%v, %v", got, err)
	}
	for name, text := range map[string]string{
		"no JSON": "{", "version 1": sociJSON("application/vnd.amazon.soci.index.v1+json", sha256Of0), "no digest": sociJSON(sociIndexType, "../x"),
		"an image": manifestJSON(ociManifest, descriptor(ociConfig, sha256Of0, 1)),
	} {
		if got, err := parseSOCIIndex([]byte(text)); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestSOCIIndexOfManifest(t *testing.T) {
	for text, want := range map[string]digest.Digest{sha256Of0: sha256Of0, "": "", "x": "", "sha256:../../x": ""} {
		if got := sociIndexOf(ocispec.Manifest{Annotations: map[string]string{sociIndexAnnotation: text}}); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// SOCI's index of an image has the same platform as the image.
func TestSOCIIndexIsNoImage(t *testing.T) {
	node := DefaultPlatform()
	soci := ocispec.Descriptor{ArtifactType: sociIndexType, Digest: sha256Of0, Platform: &node}
	img := ocispec.Descriptor{Digest: sha256Of1, Platform: &node}
	if got, ok := choosePlatform([]ocispec.Descriptor{soci, img}, node); !ok || got.Digest != img.Digest {
		t.Errorf("%+v, %v", got, ok)
	}
	if got, ok := choosePlatform([]ocispec.Descriptor{soci}, node); ok {
		t.Errorf("%+v", got)
	}
}

func FuzzParseSOCIIndex(f *testing.F) {
	f.Add([]byte(sociJSON(sociIndexType, sha256Of0)))
	f.Add([]byte(`{"config":{"mediaType":"application/vnd.amazon.soci.index.v2+json"},"layers":[{}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		ztocs, err := parseSOCIIndex(data)
		if err != nil {
			tame(t, err, codes.FailedPrecondition, codes.FailedPrecondition)
			return
		}
		for _, d := range ztocs {
			if d.Digest.Validate() != nil || d.Size < 0 {
				t.Fatalf("accepted %+v", d)
			}
		}
	})
}
