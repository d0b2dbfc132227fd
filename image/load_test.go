package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/archive"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/internal/testutil"
)

// imageWith returns an image of one layer with one file, made by another implementation.
func imageWith(t *testing.T, content string) v1.Image {
	t.Helper()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(tarOf(t, "f", content))), nil
	})
	testutil.Must(t, err)
	img, err := mutate.AppendLayers(empty.Image, layer)
	testutil.Must(t, err)
	file, err := img.ConfigFile()
	testutil.Must(t, err)
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", "amd64"
	img, err = mutate.ConfigFile(img, file)
	testutil.Must(t, err)
	return img
}

func dockerArchive(t *testing.T, tag string, img v1.Image) []byte {
	t.Helper()
	ref, err := name.NewTag(tag)
	testutil.Must(t, err)
	var out bytes.Buffer
	testutil.Must(t, tarball.Write(ref, img, &out))
	return out.Bytes()
}

// layoutDir writes an OCI layout whose index names the image with an annotation.
func layoutDir(t *testing.T, annotation string, img v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	path, err := layout.Write(dir, empty.Index)
	testutil.Must(t, err)
	testutil.Must(t, path.AppendImage(img, layout.WithAnnotations(map[string]string{nameKey: annotation})))
	return dir
}

const nameKey = "org.opencontainers.image.ref.name"

// tarDir packs a directory.
func tarDir(t *testing.T, dir string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	testutil.Must(t, w.AddFS(os.DirFS(dir)))
	testutil.Must(t, w.Close())
	return out.Bytes()
}

func gzipBytes(t *testing.T, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(data)
	testutil.Must(t, err)
	testutil.Must(t, w.Close())
	return out.Bytes()
}

func TestLoadFormats(t *testing.T) {
	img := imageWith(t, "loaded")
	id, err := img.ConfigName()
	testutil.Must(t, err)
	manifest, err := img.Digest()
	testutil.Must(t, err)
	layoutPath := layoutDir(t, "example.com/app:v1", img)
	docker := dockerArchive(t, "example.com/app:v1", img)
	for what, load := range map[string]func(*node) ([]*image.Image, error){
		"docker archive": func(s *node) ([]*image.Image, error) {
			return s.Load(t.Context(), bytes.NewReader(docker), pull.LoadOptions{})
		},
		"docker archive gzip": func(s *node) ([]*image.Image, error) {
			return s.Load(t.Context(), bytes.NewReader(gzipBytes(t, docker)), pull.LoadOptions{})
		},
		"layout tar": func(s *node) ([]*image.Image, error) {
			return s.Load(t.Context(), bytes.NewReader(tarDir(t, layoutPath)), pull.LoadOptions{})
		},
		"layout directory": func(s *node) ([]*image.Image, error) { return s.LoadFile(t.Context(), layoutPath, pull.LoadOptions{}) },
		"file": func(s *node) ([]*image.Image, error) {
			path := filepath.Join(t.TempDir(), "app.tar")
			testutil.Must(t, os.WriteFile(path, docker, 0o600))
			return s.LoadFile(t.Context(), path, pull.LoadOptions{Pin: true})
		},
	} {
		t.Run(what, func(t *testing.T) {
			root := t.TempDir()
			s := openStore(t, pull.Config{Root: root})
			images, err := load(s)
			if err != nil || len(images) != 1 || images[0].ID != id.String() {
				t.Fatalf("%v, %v, want %s", images, err, id)
			}
			got := images[0]
			if fmt.Sprint(got.RepoTags) != "[example.com/app:v1]" || got.Pinned != (what == "file") {
				t.Errorf("tags %v, pinned %v", got.RepoTags, got.Pinned)
			}
			if strings.HasPrefix(what, "layout") && fmt.Sprint(got.RepoDigests) != "[example.com/app@"+manifest.String()+"]" {
				t.Errorf("digests %v", got.RepoDigests)
			}
			if content := readFile(t, s, got, "f"); content != "loaded" {
				t.Errorf("content %q", content)
			}
			again, err := load(s)
			if err != nil || len(again) != 1 || again[0].ID != got.ID || len(s.LayerNames()) != 1 {
				t.Errorf("second load: %v, %v", again, err)
			}
			testutil.Must(t, s.Close())
			s = openStore(t, pull.Config{Root: root})
			if kept, err := s.Get("example.com/app:v1"); err != nil || kept.Pinned != (what == "file") {
				t.Errorf("after a restart: %+v, %v", kept, err)
			}
			testutil.Must(t, s.Remove(t.Context(), id.String()))
			wantEmpty(t, s)
		})
	}
}

func TestLoadWithName(t *testing.T) {
	s := openStore(t, pull.Config{})
	one, two := imageWith(t, "one"), imageWith(t, "two")
	path := layoutDir(t, "latest", one) // a tag without a repository is no name
	images, err := s.LoadFile(t.Context(), path, pull.LoadOptions{})
	testutil.Must(t, err)
	if len(images[0].RepoTags) != 0 {
		t.Errorf("tags %v", images[0].RepoTags)
	}
	images, err = s.LoadFile(t.Context(), path, pull.LoadOptions{Name: "app:1"})
	testutil.Must(t, err)
	if fmt.Sprint(images[0].RepoTags) != "[docker.io/library/app:1]" {
		t.Errorf("tags %v", images[0].RepoTags)
	}
	testutil.Must(t, layout.Path(path).AppendImage(two))
	_, err = s.LoadFile(t.Context(), path, pull.LoadOptions{Name: "app:1"})
	wantCode(t, err, codes.InvalidArgument, "a name was given for 2 images")
}

// Loading must leave nothing if content does not match its digest.
func TestLoadRefusesBadArchives(t *testing.T) {
	img := imageWith(t, strings.Repeat("x", 5000))
	layers, err := img.Layers()
	testutil.Must(t, err)
	hash, err := layers[0].Digest()
	testutil.Must(t, err)
	for what, c := range map[string]struct {
		code   codes.Code
		change func(t *testing.T, dir string)
	}{
		"corrupt layer": {codes.DataLoss, func(t *testing.T, dir string) {
			path := filepath.Join(dir, "blobs/sha256", hash.Hex)
			data, err := os.ReadFile(path)
			testutil.Must(t, err)
			data[len(data)/2] ^= 1
			testutil.Must(t, os.WriteFile(path, data, 0o600))
		}},
		"short layer": {codes.DataLoss, func(t *testing.T, dir string) {
			testutil.Must(t, os.Truncate(filepath.Join(dir, "blobs/sha256", hash.Hex), 10))
		}},
		"missing layer": {codes.InvalidArgument, func(t *testing.T, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "blobs/sha256", hash.Hex)))
		}},
		"symlink out of the layout": {codes.Unknown, func(t *testing.T, dir string) {
			path := filepath.Join(dir, "blobs/sha256", hash.Hex)
			testutil.Must(t, os.Rename(path, filepath.Join(t.TempDir(), "secret")))
			testutil.Must(t, os.Symlink("/etc/passwd", path))
		}},
		"no index": {codes.InvalidArgument, func(t *testing.T, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "index.json")))
		}},
	} {
		t.Run(what, func(t *testing.T) {
			s := openStore(t, pull.Config{})
			dir := layoutDir(t, "example.com/app:v1", img)
			c.change(t, dir)
			_, err := s.LoadFile(t.Context(), dir, pull.LoadOptions{})
			wantCode(t, err, c.code, "load "+dir)
			if what != "symlink out of the layout" {
				_, err = s.Load(t.Context(), bytes.NewReader(tarDir(t, dir)), pull.LoadOptions{})
				wantCode(t, err, c.code)
			}
			wantEmpty(t, s)
		})
	}
	s := openStore(t, pull.Config{})
	_, err = s.Load(t.Context(), strings.NewReader("not a tar"), pull.LoadOptions{})
	wantCode(t, err, codes.InvalidArgument, "read tar after 0 entries")
	wantEmpty(t, s)
}

func TestTagAndUntag(t *testing.T) {
	s := openStore(t, pull.Config{})
	for i, content := range []string{"one", "two"} {
		_, err := s.LoadFile(t.Context(), layoutDir(t, fmt.Sprintf("app:v%d", i), imageWith(t, content)), pull.LoadOptions{})
		testutil.Must(t, err)
	}
	first, err := s.Get("app:v0")
	testutil.Must(t, err)
	tagged, err := s.Tag(t.Context(), "app:v0", "app:v1")
	if err != nil || tagged.ID != first.ID || len(tagged.RepoTags) != 2 {
		t.Errorf("%+v, %v", tagged, err)
	}
	if got, err := s.Get("app:v1"); err != nil || got.ID != first.ID {
		t.Errorf("%+v, %v", got, err)
	}
	untagged, err := s.Untag(t.Context(), "app:v0")
	if err != nil || len(untagged.RepoTags) != 1 {
		t.Errorf("%+v, %v", untagged, err)
	}
	_, err = s.Untag(t.Context(), "app:v0")
	wantCode(t, err, codes.NotFound)
	_, err = s.Tag(t.Context(), "none", "app:v3")
	wantCode(t, err, codes.NotFound)
	_, err = s.Tag(t.Context(), "app:v1", "app@"+first.ID)
	wantCode(t, err, codes.InvalidArgument)
}

// Layers and archives are read in the same forms of compression, whatever else a program writes
// around the compressed data.
func TestFormsOfCompression(t *testing.T) {
	skippable := []byte{0x5f, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 'a', 'b', 'c', 'd'}
	gz := func(data []byte) []byte { return gzipBytes(t, data) }
	zst := func(data []byte) []byte { return zstandardOf(t, data).Blob }
	forms := map[string]func(data []byte) []byte{
		"plain":                func(data []byte) []byte { return data },
		"gzip, padded":         func(data []byte) []byte { return append(gz(data), make([]byte, 700)...) }, // bsdtar -czf -
		"gzip, members":        func(data []byte) []byte { return slices.Concat(gz(data[:600]), gz(nil), gz(data[600:])) },
		"zstd, padded":         func(data []byte) []byte { return append(zst(data), make([]byte, 10240)...) },
		"zstd, skippable":      func(data []byte) []byte { return append(slices.Clone(skippable), zst(data)...) }, // pzstd
		"zstd, more skippable": func(data []byte) []byte { return slices.Concat(skippable, zst(data[:600]), skippable, zst(data[600:])) },
	}
	for name, form := range forms {
		t.Run(name, func(t *testing.T) {
			data := tarOf(t, "f", "content")
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", registrytest.Layer{Blob: form(data), MediaType: ocispec.MediaTypeImageLayerGzip, DiffID: digest.FromBytes(data)})
			s := openStore(t, pull.Config{})
			if got := readFile(t, s, mustPull(t, s, reg.Host()+"/app:v1"), "f"); got != "content" {
				t.Errorf("pulled: %q", got)
			}
			archive := form(dockerArchive(t, "example.com/app:v1", imageWith(t, "loaded")))
			path := filepath.Join(t.TempDir(), "archive")
			testutil.Must(t, os.WriteFile(path, archive, 0o600))
			for way, load := range map[string]func() ([]*image.Image, error){
				"stream": func() ([]*image.Image, error) {
					return s.Load(t.Context(), bytes.NewReader(archive), pull.LoadOptions{})
				},
				"file": func() ([]*image.Image, error) { return s.LoadFile(t.Context(), path, pull.LoadOptions{}) },
			} {
				images, err := load()
				testutil.Must(t, err)
				if got := readFile(t, s, images[0], "f"); got != "loaded" {
					t.Errorf("%s: %q", way, got)
				}
			}
		})
	}
}

// Other forms are named, so that the user knows what to change.
func TestUnsupportedCompressionIsNamed(t *testing.T) {
	xz := append([]byte("\xfd7zXZ\x00\x00\x04"), make([]byte, 1000)...)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", registrytest.Layer{Blob: xz, MediaType: ocispec.MediaTypeImageLayerGzip, DiffID: digest.FromString("x")})
	s := openStore(t, pull.Config{})
	_, err := s.Pull(t.Context(), reg.Host()+"/app:v1", nil)
	wantCode(t, err, codes.FailedPrecondition, "compressed with xz")
	path := filepath.Join(t.TempDir(), "archive.tar.xz")
	testutil.Must(t, os.WriteFile(path, xz, 0o600))
	_, err = s.LoadFile(t.Context(), path, pull.LoadOptions{})
	wantCode(t, err, codes.FailedPrecondition, "load "+path, "compressed with xz")
	_, err = s.Load(t.Context(), strings.NewReader("BZh91AY&SY rest"), pull.LoadOptions{})
	wantCode(t, err, codes.FailedPrecondition, "compressed with bzip2")
	wantEmpty(t, s)
}

// A signature beside an image, as in a layout of `cosign save`, is skipped and named.
func TestLoadSkipsSignatures(t *testing.T) {
	signature, err := mutate.AppendLayers(empty.Image, static.NewLayer([]byte("{}"), "application/vnd.dev.cosign.simplesigning.v1+json"))
	testutil.Must(t, err)
	sum, err := signature.Digest()
	testutil.Must(t, err)
	dir := t.TempDir()
	testutil.Must(t, os.Chmod(dir, 0o755))
	path, err := layout.Write(filepath.Join(dir, "signed"), empty.Index)
	testutil.Must(t, err)
	testutil.Must(t, path.AppendImage(signature))
	s := openStore(t, pull.Config{})
	_, err = s.LoadFile(t.Context(), string(path), pull.LoadOptions{})
	wantCode(t, err, codes.FailedPrecondition, sum.String(), "simplesigning")
	testutil.Must(t, path.AppendImage(imageWith(t, "signed"), layout.WithAnnotations(map[string]string{nameKey: "ex/signed:1"})))
	var skipped []archive.Skipped
	images, err := s.Load(t.Context(), bytes.NewReader(tarDir(t, string(path))), pull.LoadOptions{
		Name: "other:1", Skipped: func(entry archive.Skipped) { skipped = append(skipped, entry) }})
	testutil.Must(t, err)
	if len(images) != 1 || len(skipped) != 1 || skipped[0].Name != sum.String() {
		t.Errorf("loaded %v, skipped %v", images, skipped)
	}

	log := &testutil.Buffer{}
	preloaded := openUnsettled(t, pull.Config{}, log)
	testutil.Must(t, preloaded.CollectGarbage(t.Context()))
	stop := preloading(t, preloaded, dir)
	waitImage(t, preloaded, "ex/signed:1")
	stop()
	if !strings.Contains(log.String(), sum.String()) {
		t.Errorf("the log does not name the signature: %s", log)
	}
}
