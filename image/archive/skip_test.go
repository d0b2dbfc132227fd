package archive

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// layoutWriter collects the blobs of an OCI layout.
type layoutWriter struct {
	t     testing.TB
	blobs map[string]string
}

// blob adds a blob.
func (w *layoutWriter) blob(mediaType, content string) ocispec.Descriptor {
	d := descriptor(mediaType, content)
	w.blobs[blobPath(d.Digest)] = content
	return d
}

// manifest adds a manifest with one layer.
func (w *layoutWriter) manifest(configType, config, layerType, layer string, change ...func(*ocispec.Manifest)) ocispec.Descriptor {
	m := ocispec.Manifest{Config: w.blob(configType, config), Layers: []ocispec.Descriptor{w.blob(layerType, layer)}}
	m.SchemaVersion = 2
	for _, f := range change {
		f(&m)
	}
	return w.blob(ocispec.MediaTypeImageManifest, encode(w.t, m))
}

func (w *layoutWriter) image(content string) ocispec.Descriptor {
	return w.manifest(ocispec.MediaTypeImageConfig, configOf(w.t, content), ocispec.MediaTypeImageLayer, content)
}

// index adds an index.
func (w *layoutWriter) index(entries ...ocispec.Descriptor) ocispec.Descriptor {
	return w.blob(ocispec.MediaTypeImageIndex, indexOf(w.t, entries...))
}

func indexOf(t testing.TB, entries ...ocispec.Descriptor) string {
	return encode(t, map[string]any{"schemaVersion": 2, "manifests": entries})
}

// open opens the layout as a tar and as a directory.
func (w *layoutWriter) open(entries ...ocispec.Descriptor) map[string]*Archive {
	w.t.Helper()
	files := []entry{{"index.json", indexOf(w.t, entries...), ""}}
	dir := w.t.TempDir()
	for name, content := range w.blobs {
		files = append(files, entry{name, content, ""})
	}
	for _, f := range files {
		testutil.Must(w.t, os.MkdirAll(filepath.Dir(filepath.Join(dir, f.name)), 0o755))
		testutil.Must(w.t, os.WriteFile(filepath.Join(dir, f.name), []byte(f.content), 0o600))
	}
	data := tarOf(w.t, files...)
	byTar, err := OpenTar(bytes.NewReader(data), int64(len(data)))
	testutil.Must(w.t, err)
	root, err := os.OpenRoot(dir)
	testutil.Must(w.t, err)
	w.t.Cleanup(func() { testutil.Must(w.t, root.Close()) })
	return map[string]*Archive{"tar": byTar, "directory": OpenDir(root)}
}

func annotated(d ocispec.Descriptor, key, value string) ocispec.Descriptor {
	d.Annotations = map[string]string{key: value}
	return d
}

func on(d ocispec.Descriptor, os, architecture string) ocispec.Descriptor {
	d.Platform = &ocispec.Platform{OS: os, Architecture: architecture}
	return d
}

// Entries beside an image that are no images are skipped, whatever tool wrote them.
func TestEntriesThatAreNoImages(t *testing.T) {
	const signing, toto, empty = "application/vnd.dev.cosign.simplesigning.v1+json", "application/vnd.in-toto+json", ocispec.MediaTypeEmptyJSON
	unnamed := encode(t, ocispec.Image{RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromString("{}")}}})
	subject := func(m *ocispec.Manifest) { d := descriptor(ocispec.MediaTypeImageManifest, "{}"); m.Subject = &d }
	for what, c := range map[string]struct {
		alone bool // an archive of it has an image: an artifact
		make  func(w *layoutWriter) ocispec.Descriptor
	}{
		"cosign save": {false, func(w *layoutWriter) ocispec.Descriptor {
			return annotated(w.manifest(ocispec.MediaTypeImageConfig, unnamed, signing, "{}"), "kind", "dev.cosignproject.cosign/sigs")
		}},
		"attestation of cosign": {false, func(w *layoutWriter) ocispec.Descriptor {
			return annotated(w.manifest(ocispec.MediaTypeImageConfig, unnamed, "application/vnd.dsse.envelope.v1+json", "{}"), refNameAnnotation, "ex/app:sha256-0.att")
		}},
		"bill of materials": {false, func(w *layoutWriter) ocispec.Descriptor {
			return w.manifest(ocispec.MediaTypeImageConfig, unnamed, "text/spdx+json", "{}")
		}},
		"buildx": {false, func(w *layoutWriter) ocispec.Descriptor {
			return on(annotated(w.manifest(ocispec.MediaTypeImageConfig, unnamed, toto, "{}"), "vnd.docker.reference.type", "attestation-manifest"), "unknown", "unknown")
		}},
		"buildx without a platform": {false, func(w *layoutWriter) ocispec.Descriptor {
			return annotated(w.manifest(ocispec.MediaTypeImageConfig, unnamed, toto, "{}"), "vnd.docker.reference.type", "attestation-manifest")
		}},
		"unknown platform": {false, func(w *layoutWriter) ocispec.Descriptor {
			return on(w.manifest(ocispec.MediaTypeImageConfig, unnamed, toto, "{}"), "unknown", "unknown")
		}},
		"index of attestations": {false, func(w *layoutWriter) ocispec.Descriptor {
			return w.index(on(w.manifest(empty, "{}", toto, "{}"), "unknown", "unknown"))
		}},
		"index of signatures": {false, func(w *layoutWriter) ocispec.Descriptor {
			return w.index(w.manifest(ocispec.MediaTypeImageConfig, unnamed, signing, "{}"))
		}},
		"sigstore bundle with a name": {false, func(w *layoutWriter) ocispec.Descriptor {
			bundle := func(m *ocispec.Manifest) { m.ArtifactType = "application/vnd.dev.sigstore.bundle.v0.3+json" }
			return annotated(w.manifest(empty, "{}", "application/vnd.dev.sigstore.bundle.v0.3+json", "{}", bundle, subject), refNameAnnotation, "ex/app:sig")
		}},
		"notation": {false, func(w *layoutWriter) ocispec.Descriptor {
			return w.manifest("application/vnd.cncf.notary.signature", "{}", "application/jose+json", "{}", subject)
		}},
		"artifact that cannot be stored": {false, func(w *layoutWriter) ocispec.Descriptor {
			outside := func(m *ocispec.Manifest) { m.Layers[0] = annotated(m.Layers[0], ocispec.AnnotationTitle, "../x") }
			return w.manifest("application/vnd.example", "{}", "text/plain", "x", outside)
		}},
		"Helm chart": {true, func(w *layoutWriter) ocispec.Descriptor {
			return annotated(w.manifest("application/vnd.cncf.helm.config.v1+json", "{}", "application/vnd.cncf.helm.chart.content.v1.tar+gzip", "x"), refNameAnnotation, "0.1.0")
		}},
		"artifact manifest": {false, func(w *layoutWriter) ocispec.Descriptor {
			return w.blob("application/vnd.oci.artifact.manifest.v1+json", `{"mediaType":"application/vnd.oci.artifact.manifest.v1+json","blobs":[]}`)
		}},
		"another type":     {false, func(w *layoutWriter) ocispec.Descriptor { return w.blob("text/plain", "text") }},
		"another platform": {false, func(w *layoutWriter) ocispec.Descriptor { return on(w.image("arm"), "linux", "arm64") }},
		"missing":          {false, func(*layoutWriter) ocispec.Descriptor { return descriptor(ocispec.MediaTypeImageManifest, "{}") }},
	} {
		t.Run(what, func(t *testing.T) {
			w := &layoutWriter{t, map[string]string{}}
			image := annotated(w.image("layer"), refNameAnnotation, "ex/app:1")
			other := c.make(w)
			for _, entries := range [][]ocispec.Descriptor{{image, other}, {other, image}} {
				for form, a := range w.open(entries...) {
					images, skipped, err := a.Images(node)
					testutil.Must(t, err)
					if len(images) != 1 || fmt.Sprint(images[0].Names) != "[docker.io/ex/app:1]" {
						t.Errorf("%s: %v", form, images)
					}
					if len(skipped) != 1 || skipped[0].Name == "" || skipped[0].Reason == nil {
						t.Errorf("%s: skipped %v", form, skipped)
					}
				}
			}
			for form, a := range w.open(other) {
				if _, _, err := a.Images(node); (err == nil) != c.alone {
					t.Errorf("%s: alone: %v", form, err)
				}
			}
		})
	}
}

// Another runtime may keep an image for a lower level of the CPU only, with the whole index.
func TestIndexWithMissingManifests(t *testing.T) {
	w := &layoutWriter{t, map[string]string{}}
	level := func(d ocispec.Descriptor, variant string) ocispec.Descriptor {
		d.Platform = &ocispec.Platform{OS: "linux", Architecture: "amd64", Variant: variant}
		return d
	}
	missing := func(name string) ocispec.Descriptor { return descriptor(ocispec.MediaTypeImageManifest, name) }
	here := w.index(level(missing("v3"), "v3"), level(w.image("layer"), ""), level(missing("v2"), "v2"))
	none := w.index(level(missing("v3"), "v3"), level(missing("v2"), "v2"))
	host := ocispec.Platform{OS: "linux", Architecture: "amd64", Variant: "v3"}
	for form, a := range w.open(here) {
		images, _, err := a.Images(host)
		testutil.Must(t, err)
		if images[0].Layers[0].DiffID != digest.FromString("layer") || images[0].Digest != here.Digest {
			t.Errorf("%s: %+v", form, images[0].Image)
		}
	}
	for form, a := range w.open(none) {
		if _, _, err := a.Images(host); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), digest.FromString("v3").String()) {
			t.Errorf("%s: %v", form, err)
		}
	}
}

// A named artifact is an image as others.
func TestNamedArtifactIsLoaded(t *testing.T) {
	w := &layoutWriter{t, map[string]string{}}
	model := annotated(w.manifest("application/vnd.model", "{}", "text/plain", "weights"), refNameAnnotation, "ex/model:1")
	for form, a := range w.open(w.image("layer"), model) {
		if images, skipped, err := a.Images(node); err != nil || len(images) != 2 || len(skipped) != 0 {
			t.Errorf("%s: %v, skipped %v, %v", form, images, skipped, err)
		}
	}
}

// Damage is never skipped.
func TestDamagedEntryFails(t *testing.T) {
	w := &layoutWriter{t, map[string]string{}}
	good, bad := w.image("layer"), w.image("other")
	w.blobs[blobPath(bad.Digest)] += " "
	encrypted := w.manifest(ocispec.MediaTypeImageConfig, configOf(t, "x"), ocispec.MediaTypeImageLayer+"+encrypted", "x")
	for what, entry := range map[string]ocispec.Descriptor{"damaged": bad, "encrypted": encrypted} {
		for form, a := range w.open(good, entry) {
			if _, _, err := a.Images(node); err == nil {
				t.Errorf("%s, %s: it is skipped", what, form)
			}
		}
	}
}

// A docker archive names attachments by their tags.
func TestAttachmentsInDockerArchive(t *testing.T) {
	tag := "ex/app:sha256-" + strings.Repeat("0", 64)
	entries := []dockerImage{
		{Config: "c", RepoTags: []string{tag + ".sig"}, Layers: []string{"s"}}, {Config: "c", RepoTags: []string{tag}, Layers: []string{"s"}},
		{Config: "c", RepoTags: []string{"ex/app:1"}, Layers: []string{"l"}},
	}
	files := []entry{{"c", configOf(t, "layer"), ""}, {"l", "layer", ""}, {"s", "{}", ""}}
	open := func(list []dockerImage) ([]Image, []Skipped, error) {
		data := tarOf(t, append(slices.Clone(files), entry{"manifest.json", encode(t, list), ""})...)
		a, err := OpenTar(bytes.NewReader(data), int64(len(data)))
		testutil.Must(t, err)
		return a.Images(node)
	}
	images, skipped, err := open(entries)
	if err != nil || len(images) != 1 || len(skipped) != 2 || skipped[0].Name != tag+".sig" {
		t.Errorf("%v, skipped %v, %v", images, skipped, err)
	}
	if _, _, err := open(entries[:1]); errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), tag) {
		t.Errorf("without an image: %v", err)
	}
}

// The manifest of a signature in an index does not replace the image.
func TestIndexWithArtifacts(t *testing.T) {
	w := &layoutWriter{t, map[string]string{}}
	sbom := w.manifest("application/spdx+json", "{}", "text/spdx+json", "{}")
	sbom.ArtifactType = "application/spdx+json"
	attestation := on(w.manifest(ocispec.MediaTypeEmptyJSON, "{}", "application/vnd.in-toto+json", "{}"), "unknown", "unknown")
	for form, a := range w.open(w.index(sbom, attestation, w.image("layer"))) {
		images, _, err := a.Images(node)
		testutil.Must(t, err)
		if images[0].Artifact != nil || images[0].Layers[0].DiffID != digest.FromString("layer") {
			t.Errorf("%s: %+v", form, images[0].Image)
		}
	}
}
