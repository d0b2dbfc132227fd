package registry

import (
	"encoding/json"
	"fmt"
	"path"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// titled is the descriptor of an artifact's blob with a title.
func titled(title string) string {
	text, err := json.Marshal(title)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"mediaType":"application/octet-stream","digest":%q,"size":1,"annotations":{"org.opencontainers.image.title":%s}}`,
		sha256Of1, text)
}

// artifactJSON is the manifest of an artifact with blobs of these titles.
func artifactJSON(titles ...string) string {
	var blobs []string
	for _, title := range titles {
		blobs = append(blobs, titled(title))
	}
	return manifestJSON(ociManifest, descriptor(ocispec.MediaTypeEmptyJSON, sha256Of0, 2), blobs...)
}

func TestArtifactPaths(t *testing.T) {
	long := strings.Repeat("n", maxArtifactName)
	untitled := "sha256-" + strings.TrimPrefix(sha256Of1, "sha256:")
	many := make([]string, MaxLayers+1)
	for i := range many {
		many[i] = fmt.Sprint("f", i)
	}
	for _, c := range []struct {
		name   string
		titles []string
		want   string // paths; empty: refused
		text   string
	}{
		{"one", []string{"model.gguf"}, "model.gguf", ""},
		{"directories", []string{"a/b/c", "a/b/d", "a/e", "f"}, "a/b/c a/b/d a/e f", ""},
		{"leading ./", []string{"./a"}, "a", ""},
		{"no title", []string{""}, untitled, ""},
		{"spaces and other scripts", []string{"Größe 模型.bin"}, "Größe 模型.bin", ""},
		{"long", []string{long}, long, ""},
		{"dots", []string{"..."}, "...", ""},
		{"most", many[1:], strings.Join(many[1:], " "), ""},

		{"none", nil, "", "no files"},
		{"too many", many, "", "501 blobs"},
		{"absolute", []string{"/etc/passwd"}, "", "not a path"},
		{"parent", []string{"../etc/passwd"}, "", "not a path"},
		{"parent inside", []string{"a/../../b"}, "", "not a path"},
		{"hidden parent", []string{"./../b"}, "", "not a path"},
		{"only parent", []string{".."}, "", "not a path"},
		{"directory", []string{"a/"}, "", "not a path"},
		{"this directory", []string{"."}, "", "not a path"},
		{"only ./", []string{"./"}, "", "not a path"},
		{"unclean", []string{"a//b"}, "", "not a path"},
		{"zero", []string{"a\x00b"}, "", "unprintable"},
		{"new line", []string{"a\nb"}, "", "unprintable"},
		{"whiteout", []string{"a/.wh.b"}, "", "whiteout"},
		{"opaque", []string{".wh..wh..opq"}, "", "whiteout"},
		{"name too long", []string{long + "n"}, "", "255"},
		{"path too long", []string{strings.Repeat("a/", maxArtifactPath/2) + "b"}, "", "1024"},
		{"too deep", []string{strings.Repeat("a/", maxArtifactDepth) + "b"}, "", "32 directories"},
		{"twice", []string{"a", "b", "a"}, "", "this path"},
		{"twice with ./", []string{"a", "./a"}, "", "this path"},
		{"no title twice", []string{"", ""}, "", "this path"},
		{"file and directory", []string{"a", "a/b"}, "", `is the file "a"`},
		{"directory and file", []string{"a/b/c", "a/b"}, "", "this path"},
	} {
		t.Run(c.name, func(t *testing.T) {
			doc, err := parseDocument([]byte(artifactJSON(c.titles...)), ociManifest)
			if c.want == "" {
				if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), c.text) {
					t.Errorf("%v, want %q", err, c.text)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var paths []string
			for _, f := range doc.artifact.Files {
				paths = append(paths, f.Path)
			}
			if got := strings.Join(paths, " "); got != c.want {
				t.Errorf("%q", got)
			}
			checkArtifact(t, doc)
		})
	}
}

// checkArtifact checks what the package promises about an accepted artifact.
func checkArtifact(t *testing.T, doc document) {
	t.Helper()
	seen := map[string]bool{}
	for _, f := range doc.artifact.Files {
		if f.Path != path.Clean("/" + f.Path)[1:] || f.Path == "" || seen[f.Path] || strings.Contains(f.Path, "\x00") {
			t.Fatalf("accepted %q", f.Path)
		}
		for dir := f.Path; dir != "."; dir = path.Dir(dir) {
			if seen[dir] {
				t.Fatalf("%q is below a file", f.Path)
			}
		}
		seen[f.Path] = true
	}
	img, err := doc.image()
	if err != nil {
		tame(t, err, codes.FailedPrecondition)
		return
	}
	stored := ParseArtifact(img.RawConfig)
	if stored == nil || len(stored.Files) != len(img.Layers) || stored.Type != doc.artifact.Type {
		t.Fatalf("stored as %s", img.RawConfig)
	}
}

func TestIsArtifact(t *testing.T) {
	layer := descriptor(ociLayer, sha256Of1, 1)
	other := titled("f")
	typed := func(config string, layers ...string) string {
		return strings.Replace(manifestJSON(ociManifest, descriptor(config, sha256Of0, 1), layers...), `"config"`,
			`"artifactType":"application/vnd.example","config"`, 1)
	}
	for _, c := range []struct {
		name, data string
		want       bool
	}{
		{"image", manifestJSON(ociManifest, descriptor(ociConfig, sha256Of0, 1), layer), false},
		{"image with artifactType", typed(ociConfig, layer), false},
		{"artifactType", typed(ociConfig, other), true},
		{"config", manifestJSON(ociManifest, descriptor("application/vnd.cncf.helm.config.v1+json", sha256Of0, 1), other), true},
		{"empty config", typed(ocispec.MediaTypeEmptyJSON, other), true},
		{"placeholder", typed(ocispec.MediaTypeEmptyJSON, other, descriptor(ocispec.MediaTypeEmptyJSON, sha256Of0, 2)), true},
	} {
		doc, err := parseDocument([]byte(c.data), ociManifest)
		if err != nil || (doc.artifact != nil) != c.want {
			t.Errorf("%s: %+v, %v", c.name, doc.artifact, err)
		}
		if doc.artifact != nil && len(doc.artifact.Files) != 1 {
			t.Errorf("%s: files %+v", c.name, doc.artifact.Files)
		}
	}
}

// The configuration of a container image cannot pass for an artifact's.
func TestParseArtifactOfImages(t *testing.T) {
	for _, config := range []string{
		`{}`, `null`, `[]`, `{"artifact":{}}`, `{"artifact":{"files":[{"path":"a"}]}}`,
		`{"artifact":{"files":[{"path":"a"}]},"rootfs":{"diff_ids":["` + sha256Of0 + `"]}}`,
	} {
		if a := ParseArtifact([]byte(config)); a != nil {
			t.Errorf("%s: %+v", config, a)
		}
	}
}
