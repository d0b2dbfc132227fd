package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/archive"
	"berth/image/layer"
	"berth/image/pull"
	"berth/internal/testutil"
)

// Another implementation reads saved archives and finds the images as they were. Loaded again they
// have the same IDs and content.
func TestSave(t *testing.T) {
	s := openStore(t, pull.Config{})
	one, two := imageWith(t, "one"), imageWith(t, "two")
	for tag, img := range map[string]v1.Image{"example.com/one:v1": one, "example.com/two:v2": two} {
		_, err := s.Load(t.Context(), bytes.NewReader(dockerArchive(t, tag, img)), pull.LoadOptions{})
		testutil.Must(t, err)
	}
	_, err := s.Tag(t.Context(), "example.com/one:v1", "example.com/one:other")
	testutil.Must(t, err)
	refs := []string{"example.com/one:v1", "example.com/two:v2", "example.com/one:other", "example.com/one:v1"}
	for _, format := range []archive.Format{archive.OCI, archive.Docker} {
		t.Run(string(format), func(t *testing.T) {
			var out bytes.Buffer
			testutil.Must(t, s.Save(t.Context(), &out, image.SaveOptions{Refs: refs, Format: format}))
			wantDockerImage(t, out.Bytes(), "example.com/one:v1", one)
			wantDockerImage(t, out.Bytes(), "example.com/one:other", one)
			wantDockerImage(t, out.Bytes(), "example.com/two:v2", two)
			if format == archive.OCI {
				wantLayout(t, out.Bytes(), 3)
			}
			other := openStore(t, pull.Config{})
			images, err := other.Load(t.Context(), bytes.NewReader(out.Bytes()), pull.LoadOptions{})
			testutil.Must(t, err)
			if len(images) != 2 {
				t.Fatalf("%d images", len(images))
			}
			for content, ref := range map[string]string{"one": "example.com/one:other", "two": "example.com/two:v2"} {
				img, err := other.Get(ref)
				testutil.Must(t, err)
				saved, err := s.Get(ref)
				testutil.Must(t, err)
				if img.ID != saved.ID || readFile(t, other, img, "f") != content {
					t.Errorf("%s is %s, was %s", ref, img.ID, saved.ID)
				}
			}
		})
	}
}

func wantDockerImage(t *testing.T, data []byte, tag string, want v1.Image) {
	t.Helper()
	ref, err := name.NewTag(tag)
	testutil.Must(t, err)
	img, err := tarball.Image(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }, &ref)
	testutil.Must(t, err)
	testutil.Must(t, validate.Image(img))
	got, err := img.ConfigName()
	testutil.Must(t, err)
	if id, err := want.ConfigName(); err != nil || got != id {
		t.Errorf("%s is %s, want %s, %v", tag, got, id, err)
	}
}

// wantLayout reads an OCI layout and checks all digests in it.
func wantLayout(t *testing.T, data []byte, entries int) {
	t.Helper()
	dir := t.TempDir()
	in := tar.NewReader(bytes.NewReader(data))
	for {
		hdr, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		testutil.Must(t, err)
		path := filepath.Join(dir, hdr.Name)
		testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if hdr.Typeflag == tar.TypeReg {
			content, err := io.ReadAll(in)
			testutil.Must(t, err)
			testutil.Must(t, os.WriteFile(path, content, 0o600))
			if encoded, ok := strings.CutPrefix(hdr.Name, "blobs/sha256/"); ok && digest.FromBytes(content).Encoded() != encoded {
				t.Errorf("%s has another digest", hdr.Name)
			}
		}
	}
	index, err := layout.ImageIndexFromPath(dir)
	testutil.Must(t, err)
	testutil.Must(t, validate.Index(index, validate.Fast)) // in full it expects gzip
	manifest, err := index.IndexManifest()
	testutil.Must(t, err)
	if len(manifest.Manifests) != entries {
		t.Errorf("%d entries, want %d: %+v", len(manifest.Manifests), entries, manifest)
	}
}

// Nothing is written for an image whose layers cannot be restored.
func TestSaveFailures(t *testing.T) {
	s := openStore(t, pull.Config{})
	replaced, err := mutate.AppendLayers(imageWith(t, "below"), layerOf(t, twice(t)))
	testutil.Must(t, err)
	_, err = s.Load(t.Context(), bytes.NewReader(dockerArchive(t, "example.com/replaced:v1", replaced)), pull.LoadOptions{})
	testutil.Must(t, err)
	_, err = s.Load(t.Context(), bytes.NewReader(dockerArchive(t, "example.com/good:v1", imageWith(t, "good"))), pull.LoadOptions{})
	testutil.Must(t, err)
	for what, c := range map[string]struct {
		refs   []string
		format archive.Format
		code   codes.Code
		text   string
	}{
		"missing":      {[]string{"example.com/good:v1", "example.com/other:v1"}, "", codes.NotFound, "not found"},
		"no image":     {nil, "", codes.InvalidArgument, "no image"},
		"format":       {[]string{"example.com/good:v1"}, "zip", codes.InvalidArgument, `"zip"`},
		"not restored": {[]string{"example.com/good:v1", "example.com/replaced:v1"}, "", codes.FailedPrecondition, "replace each other"},
	} {
		t.Run(what, func(t *testing.T) {
			var out bytes.Buffer
			wantCode(t, s.Save(t.Context(), &out, image.SaveOptions{Refs: c.refs, Format: c.format}), c.code, c.text)
			if out.Len() > 0 {
				t.Errorf("%d bytes are written", out.Len())
			}
		})
	}
	full := errors.New("disk is full")
	if err := s.Save(t.Context(), failingWriter{full}, image.SaveOptions{Refs: []string{"example.com/good:v1"}}); !errors.Is(err, full) {
		t.Errorf("full disk: %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Save(cancelled, io.Discard, image.SaveOptions{Refs: []string{"example.com/good:v1"}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// twice is a tar with two files of one name.
func twice(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, content := range []string{"first", "second"} {
		testutil.Must(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "f", Size: int64(len(content)), Mode: 0o644}))
		_, err := io.WriteString(w, content)
		testutil.Must(t, err)
	}
	testutil.Must(t, w.Close())
	return out.Bytes()
}

func layerOf(t *testing.T, data []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	testutil.Must(t, err)
	return l
}

// An open tar keeps its layer, whoever removes the image.
func TestOpenTar(t *testing.T) {
	s := openStore(t, pull.Config{})
	images, err := s.Load(t.Context(), bytes.NewReader(dockerArchive(t, "example.com/app:v1", imageWith(t, "kept"))), pull.LoadOptions{})
	testutil.Must(t, err)
	want := tarOf(t, "f", "kept")
	restored, err := s.OpenTar(t.Context(), digest.FromBytes(want))
	testutil.Must(t, err)
	testutil.Must(t, s.Remove(t.Context(), images[0].ID))
	got, err := io.ReadAll(restored.Whole(t.Context()))
	if testutil.Must(t, err); !bytes.Equal(got, want) || restored.Digest() != digest.FromBytes(want) {
		t.Error("the tar differs")
	}
	part := make([]byte, 4)
	if _, err := restored.ReadAt(part, int64(bytes.Index(want, []byte("kept")))); err != nil || string(part) != "kept" {
		t.Errorf("range: %q, %v", part, err)
	}
	testutil.Must(t, restored.Close())
	wantEmpty(t, s)
	_, err = s.OpenTar(t.Context(), digest.FromBytes(want))
	wantCode(t, err, codes.NotFound, "no layer")
	if errors.Is(err, layer.ErrNoTar) || !strings.Contains(err.Error(), digest.FromBytes(want).String()) {
		t.Errorf("%v", err)
	}
}
