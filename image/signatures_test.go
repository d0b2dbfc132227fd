package image_test

import (
	"os"
	"path/filepath"
	"testing"

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
	evidence := &trust.Evidence{Documents: []trust.Document{{Digest: "sha256:d", Raw: []byte("{}"), Signatures: [][]byte{[]byte("s")}}}}

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
	if got := s.Evidence(img.ID); got == nil || len(got.Documents) != 1 {
		t.Errorf("a new daemon has %+v", got)
	}
}
