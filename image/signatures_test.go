package image_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/pull"
	"berth/image/registry"
	"berth/image/registry/registrytest"
	"berth/image/trust"
	"berth/internal/testutil"
)

// commitSigned commits an image of a registry, whose layers are in the store, under a name with
// evidence.
func commitSigned(t *testing.T, s *node, name string, evidence *trust.Evidence) (*image.Image, error) {
	t.Helper()
	ref, err := registry.ParseReference(name)
	testutil.Must(t, err)
	repo, err := s.Client().Open(ref, registry.Credentials{})
	testutil.Must(t, err)
	defer repo.Close()
	img, err := repo.Resolve(t.Context(), registry.DefaultPlatform())
	testutil.Must(t, err)
	release, err := s.Acquire(t.Context(), name, image.LayersOf(img))
	testutil.Must(t, err)
	defer release()
	return s.Commit(t.Context(), image.Naming{Refs: []registry.Reference{ref}, Evidence: evidence}, img, s.Primary())
}

// An image is visible only with its evidence. Otherwise a policy would reject it until it is
// removed, because kubelet does not pull a present image again.
func TestEvidenceIsWrittenBeforeItsImage(t *testing.T) {
	reg := registrytest.New(t)
	layer := plain(t, "f", "content")
	reg.PutImage("app", "v1", "", layer)
	reg.PutImage("app", "v2", "another configuration", layer)
	cfg := pull.Config{Root: t.TempDir()}
	s := openStore(t, cfg)
	mustPull(t, s, reg.Host()+"/app:v1")
	name := reg.Host() + "/app:v2"
	evidence := evidenceOf("index")

	dir := filepath.Join(cfg.Root, "signatures")
	testutil.Must(t, os.Rename(dir, dir+".away"))
	if _, err := commitSigned(t, s, name, evidence); err == nil {
		t.Error("committed although the evidence cannot be written")
	}
	_, err := s.Get(name)
	wantCode(t, err, codes.NotFound)
	testutil.Must(t, os.Rename(dir+".away", dir))

	img, err := commitSigned(t, s, name, evidence)
	testutil.Must(t, err)
	testutil.Must(t, s.Close())
	s = openStore(t, cfg)
	wantEvidence(t, s, img, "index")
}

// evidenceOf returns evidence with a signed document.
func evidenceOf(raw string) *trust.Evidence {
	return &trust.Evidence{Documents: []trust.Document{
		{Digest: digest.FromString(raw), Raw: []byte(raw), Signatures: [][]byte{[]byte("s")}}}}
}

func wantEvidence(t *testing.T, s *node, img *image.Image, documents ...string) {
	t.Helper()
	var got []string
	if kept := s.Evidence(img.ID); kept != nil {
		for _, d := range kept.Documents {
			got = append(got, string(d.Raw))
		}
	}
	if slices.Sort(got); !slices.Equal(got, documents) {
		t.Errorf("evidence of %q, want %q", got, documents)
	}
}

// A pull by another name, or for another namespace, keeps the evidence of earlier pulls.
func TestEvidenceOfPullsIsMerged(t *testing.T) {
	reg := registrytest.New(t)
	layer := plain(t, "f", "content")
	reg.PutImage("app", "v1", "", layer)
	reg.PutImage("copy", "v1", "", layer)
	cfg := pull.Config{Root: t.TempDir()}
	s := openStore(t, cfg)
	img := mustPull(t, s, reg.Host()+"/app:v1")
	for _, p := range []struct {
		name     string
		evidence *trust.Evidence
	}{{"/app:v1", evidenceOf("a")}, {"/copy:v1", evidenceOf("b")}, {"/copy:v1", nil}} {
		if _, err := commitSigned(t, s, reg.Host()+p.name, p.evidence); err != nil {
			t.Fatal(err)
		}
	}
	wantEvidence(t, s, img, "a", "b")
	testutil.Must(t, s.Close())
	s = openStore(t, cfg)
	wantEvidence(t, s, img, "a", "b")
	testutil.Must(t, s.Remove(t.Context(), img.ID))
	wantEvidence(t, s, img)
}
