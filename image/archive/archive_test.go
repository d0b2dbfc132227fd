package archive

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/testutil"
)

// entry is a file of a test's tar; a link if target is set.
type entry struct{ name, content, target string }

func tarOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		hdr := &tar.Header{Name: e.name, Mode: 0o644, Size: int64(len(e.content)), Typeflag: tar.TypeReg}
		if e.target != "" {
			hdr.Typeflag, hdr.Linkname = tar.TypeSymlink, e.target
		}
		testutil.Must(t, w.WriteHeader(hdr))
		_, err := io.WriteString(w, e.content)
		testutil.Must(t, err)
	}
	testutil.Must(t, w.Close())
	return out.Bytes()
}

func encode(t testing.TB, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	testutil.Must(t, err)
	return string(data)
}

func configOf(t testing.TB, layers ...string) string {
	t.Helper()
	c := ocispec.Image{Platform: ocispec.Platform{OS: "linux", Architecture: "amd64"}}
	for _, l := range layers {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digest.FromString(l))
	}
	return encode(t, c)
}

var node = ocispec.Platform{OS: "linux", Architecture: "amd64"}

// docker save up to 24 stores equal layers once and links to them.
func TestDockerArchiveWithLinkedLayers(t *testing.T) {
	t.Parallel()
	manifest := encode(t, []dockerImage{{Config: "c.json", RepoTags: []string{"app:v1", "bad tag"}, Layers: []string{"a/layer.tar", "b/layer.tar"}}})
	data := tarOf(t, entry{"a/layer.tar", "layer", ""}, entry{"b/layer.tar", "", "../a/layer.tar"},
		entry{"c.json", configOf(t, "layer", "layer"), ""}, entry{"manifest.json", manifest, ""})
	a, err := OpenTar(bytes.NewReader(data), int64(len(data)))
	testutil.Must(t, err)
	images, _, err := a.Images(node)
	testutil.Must(t, err)
	if len(images) != 1 || fmt.Sprint(images[0].Names) != "[docker.io/library/app:v1]" || len(images[0].Layers) != 2 {
		t.Fatalf("%+v", images)
	}
	for _, l := range images[0].Layers {
		blob, err := a.Blob(l.Blob)
		testutil.Must(t, err)
		if content, err := io.ReadAll(blob); err != nil || string(content) != "layer" {
			t.Errorf("%q, %v", content, err)
		}
		testutil.Must(t, blob.Close())
	}
}

func TestOpenTarRefuses(t *testing.T) {
	t.Parallel()
	loop := tarOf(t, entry{"manifest.json", "", "index.json"}, entry{"index.json", "", "manifest.json"})
	truncated := tarOf(t, entry{"index.json", string(make([]byte, 10000)), ""})[:4096]
	for what, data := range map[string][]byte{
		"links that form a loop": loop,
		"an empty tar":           tarOf(t),
		"a truncated tar":        truncated,
		"no tar":                 []byte("text"),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			a, err := OpenTar(bytes.NewReader(data), int64(len(data)))
			if err == nil {
				_, _, err = a.Images(node)
			}
			if err == nil {
				t.Error("accepted")
			}
		})
	}
}

// FuzzOpenTar checks that every blob of an image is the blob that the image names.
func FuzzOpenTar(f *testing.F) {
	layer := "layer"
	config := configOf(f, layer)
	f.Add(tarOf(f, entry{"l", layer, ""}, entry{"c", config, ""}, entry{"manifest.json", encode(f, []dockerImage{{Config: "c", Layers: []string{"l"}}}), ""}))
	manifest := encode(f, ocispec.Manifest{
		Config: descriptor(ocispec.MediaTypeImageConfig, config),
		Layers: []ocispec.Descriptor{descriptor(ocispec.MediaTypeImageLayer, layer)},
	})
	index := encode(f, map[string]any{"schemaVersion": 2, "manifests": []ocispec.Descriptor{descriptor(ocispec.MediaTypeImageManifest, manifest)}})
	var files []entry
	for _, content := range []string{layer, config, manifest} {
		files = append(files, entry{blobPath(digest.FromString(content)), content, ""})
	}
	f.Add(tarOf(f, append(files, entry{"index.json", index, ""})...))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := OpenTar(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			return
		}
		images, _, err := a.Images(node)
		if err != nil {
			return
		}
		for _, img := range images {
			for _, l := range img.Layers {
				blob, err := a.Blob(l.Blob)
				if err != nil {
					continue
				}
				if content, err := io.ReadAll(blob); err == nil && l.Blob.Digest.Algorithm().FromBytes(content) != l.Blob.Digest {
					t.Errorf("blob %s has other content", l.Blob.Digest)
				}
			}
		}
	})
}

func descriptor(mediaType, content string) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromString(content), Size: int64(len(content))}
}
