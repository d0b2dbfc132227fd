package registry

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	ociManifest = ocispec.MediaTypeImageManifest
	ociIndex    = ocispec.MediaTypeImageIndex
	ociConfig   = ocispec.MediaTypeImageConfig
	ociLayer    = ocispec.MediaTypeImageLayerGzip
)

func descriptor(mediaType, dgst string, size int64) string {
	return fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d}`, mediaType, dgst, size)
}

func manifestJSON(mediaType, config string, layers ...string) string {
	return fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":%s,"layers":[%s]}`, mediaType, config, strings.Join(layers, ","))
}

func TestParseDocument(t *testing.T) {
	config := descriptor(ociConfig, sha256Of0, 1)
	layer := descriptor(ociLayer, sha256Of1, 1)
	dockerLayer := descriptor("application/vnd.docker.image.rootfs.diff.tar.gzip", sha256Of1, 1)
	many := make([]string, MaxLayers+1)
	for i := range many {
		many[i] = layer
	}
	for _, c := range []struct {
		name, data, contentType string
		code                    codes.Code
		text                    string
	}{
		{"oci", manifestJSON(ociManifest, config, layer), ociManifest, codes.OK, ""},
		{"oci without types", manifestJSON("", config, layer), "application/json; charset=utf-8", codes.OK, ""},
		{"docker", manifestJSON(mediaTypeDockerManifest, descriptor(mediaTypeDockerConfig, sha256Of0, 1), dockerLayer), mediaTypeDockerManifest, codes.OK, ""},
		{"docker 1.10 config", manifestJSON(mediaTypeDockerManifest, descriptor("application/octet-stream", sha256Of0, 1), dockerLayer), mediaTypeDockerManifest, codes.OK, ""},
		{"no layers", manifestJSON(ociManifest, config), ociManifest, codes.OK, ""},
		{"most layers", manifestJSON(ociManifest, config, many[1:]...), ociManifest, codes.OK, ""},
		{"index", `{"schemaVersion":2,"manifests":[]}`, ociIndex, codes.OK, ""},
		{"docker list", `{"schemaVersion":2,"mediaType":"` + mediaTypeDockerList + `","manifests":[]}`, mediaTypeDockerList, codes.OK, ""},

		{"not JSON", `<html>hunter2`, "text/html", codes.FailedPrecondition, "invalid JSON"},
		{"empty", `{}`, ociManifest, codes.FailedPrecondition, "either"},
		{"neither", `{"schemaVersion":2}`, ociManifest, codes.FailedPrecondition, "either"},
		{"schema 1", `{"schemaVersion":1,"fsLayers":[]}`, mediaTypeSignedSchema1, codes.FailedPrecondition, "schema 1"},
		{"schema 1 by type", manifestJSON("", config, layer), mediaTypeDockerSchema1, codes.FailedPrecondition, "schema 1"},
		{"both (CVE-2021-41190)", `{"schemaVersion":2,"manifests":[],"config":` + config + `,"layers":[]}`, ociManifest, codes.FailedPrecondition, "either"},
		{"index said to be a manifest", `{"schemaVersion":2,"manifests":[]}`, ociManifest, codes.FailedPrecondition, "does not match the media type"},
		{"manifest that says it is an index", manifestJSON(ociIndex, config, layer), "", codes.FailedPrecondition, "does not match the media type"},
		{"no config", `{"schemaVersion":2,"layers":[` + layer + `]}`, ociManifest, codes.FailedPrecondition, "no config"},
		{"artifact", manifestJSON(ociManifest, descriptor("application/vnd.cncf.helm.config.v1+json", sha256Of0, 1), layer), ociManifest, codes.OK, ""},
		{"encrypted layer", manifestJSON(ociManifest, config, descriptor(ociLayer+"+encrypted", sha256Of0, 1)), ociManifest, codes.FailedPrecondition, "no container image's layer"},
		{"in-toto layer", manifestJSON(ociManifest, config, descriptor("application/vnd.in-toto+json", sha256Of0, 1)), ociManifest, codes.FailedPrecondition, "in-toto"},
		{"layer digest is a path (CVE-2024-3727)", manifestJSON(ociManifest, config, descriptor(ociLayer, "sha256:../../../../etc/passwd", 1)), ociManifest, codes.FailedPrecondition, "layer 0"},
		{"config digest is empty", manifestJSON(ociManifest, descriptor(ociConfig, "", 1), layer), ociManifest, codes.FailedPrecondition, "config"},
		{"weak digest", manifestJSON(ociManifest, config, descriptor(ociLayer, "md5:"+hex(32), 1)), ociManifest, codes.FailedPrecondition, "layer 0"},
		{"negative size", manifestJSON(ociManifest, config, descriptor(ociLayer, sha256Of0, -1)), ociManifest, codes.FailedPrecondition, "negative"},
		{"one blob, two sizes", manifestJSON(ociManifest, config, descriptor(ociLayer, sha256Of0, 1), descriptor(ociLayer, sha256Of0, 2)), ociManifest, codes.FailedPrecondition, "two sizes"},
		{"huge config", manifestJSON(ociManifest, descriptor(ociConfig, sha256Of0, MaxConfigSize+1), layer), ociManifest, codes.FailedPrecondition, "larger than"},
		{"too many layers", manifestJSON(ociManifest, config, many...), ociManifest, codes.FailedPrecondition, "501 layers"},
	} {
		_, err := parseDocument([]byte(c.data), c.contentType)
		if errdefs.Code(err) != c.code || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v; want %v and %q", c.name, err, c.code, c.text)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error quotes the content: %v", c.name, err)
		}
	}
}

// tame fails a fuzz target if the error has none of the codes, is long, or quotes the input
// unchanged.
func tame(t *testing.T, err error, allowed ...codes.Code) {
	t.Helper()
	if code := errdefs.Code(err); !slices.Contains(allowed, code) {
		t.Fatalf("code %v: %v", code, err)
	}
	if text := err.Error(); len(text) > 1000 || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Fatalf("%d bytes: %q", len(text), text)
	}
}

func FuzzParseDocument(f *testing.F) {
	config, layer := descriptor(ociConfig, sha256Of0, 1), descriptor(ociLayer, sha256Of1, 1)
	f.Add([]byte(manifestJSON(ociManifest, config, layer)), ociManifest)
	f.Add([]byte(`{"schemaVersion":2,"manifests":[`+descriptor(ociManifest, sha256Of0, 2)+`]}`), ociIndex)
	f.Add([]byte(`{"schemaVersion":1,"fsLayers":[]}`), mediaTypeSignedSchema1)
	f.Add([]byte(artifactJSON("model/a.bin", "b", "../c")), ociManifest)
	f.Add([]byte(artifactJSON("a", "a/b")), ociManifest)
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"platform":null}],"layers":null}`), "")
	f.Fuzz(func(t *testing.T, data []byte, contentType string) {
		doc, err := parseDocument(data, contentType)
		if err != nil {
			tame(t, err, codes.FailedPrecondition)
			return
		}
		if doc.index != nil {
			choosePlatform(doc.index, DefaultPlatform())
			return
		}
		for _, d := range append(doc.manifest.Layers, doc.manifest.Config) {
			if d.Digest.Validate() != nil || d.Size < 0 {
				t.Fatalf("accepted %+v", d)
			}
		}
		if len(doc.manifest.Layers) > MaxLayers {
			t.Fatal("accepted too many layers")
		}
		if doc.artifact != nil {
			checkArtifact(t, doc)
		}
	})
}

func TestParseConfig(t *testing.T) {
	layers := []ocispec.Descriptor{{Digest: sha256Of0}}
	for data, want := range map[string]string{
		`{"rootfs":{"diff_ids":["` + sha256Of1 + `"]}}`:                     "",
		`{"rootfs":{"diff_ids":[]}}`:                                        "0 layers, manifest 1",
		`{"rootfs":{"diff_ids":["` + sha256Of1 + `","` + sha256Of1 + `"]}}`: "2 layers, manifest 1",
		`{"rootfs":{"diff_ids":["../../x"]}}`:                               "layer 0",
		`{"rootfs":{"diff_ids":["sha512:` + hex(128) + `"]}}`:               "not a sha256 digest",
		`[]`: "object expected, not array",
	} {
		_, got, err := parseConfig([]byte(data), layers)
		switch {
		case want == "" && (err != nil || len(got) != 1 || got[0].DiffID != sha256Of1 || got[0].Blob.Digest != sha256Of0):
			t.Errorf("%s: %+v, %v", data, got, err)
		case want != "" && (errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v; want %q", data, err, want)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["` + sha256Of1 + `"]}}`))
	f.Add([]byte(`{"config":{"Env":null},"rootfs":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		_, layers, err := parseConfig(data, []ocispec.Descriptor{{Digest: sha256Of0}})
		if err != nil {
			tame(t, err, codes.FailedPrecondition)
			return
		}
		if len(layers) != 1 || layers[0].DiffID.Algorithm() != digest.SHA256 || layers[0].DiffID.Validate() != nil {
			t.Fatalf("accepted %+v", layers)
		}
	})
}

// Small values in large numbers take many times their size in memory.
func TestTooManyValues(t *testing.T) {
	many := "[{}" + strings.Repeat(",{}", MaxValues) + "]"
	for _, doc := range []string{`{"schemaVersion":2,"manifests":` + many + `}`, `{"schemaVersion":2,"config":{},"layers":` + many + `}`} {
		_, err := parseDocument([]byte(doc), "")
		wantCode(t, err, codes.FailedPrecondition, "JSON values")
	}
	_, _, err := parseConfig([]byte(`{"history":`+many+`}`), nil)
	wantCode(t, err, codes.FailedPrecondition, "JSON values")
	label, err := json.Marshal(many + `\",{`)
	if err != nil {
		t.Fatal(err)
	}
	c, _, err := parseConfig([]byte(`{"config":{"Labels":{"a":`+string(label)+`}}}`), nil)
	if err != nil || len(c.Config.Labels["a"]) != len(many)+4 {
		t.Errorf("a label with much JSON: %v", err)
	}
}

func mustJSON(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
