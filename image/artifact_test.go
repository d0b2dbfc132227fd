package image_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/internal/testutil"
)

const modelType = "application/vnd.example.model"

// artifactFiles are files of all kinds, among them those that look like compressed layers.
func artifactFiles(t *testing.T) []registrytest.File {
	t.Helper()
	return []registrytest.File{
		{Title: "config.json", Content: []byte("{}")},
		{Title: "weights/model-1.bin", Content: bytes.Repeat([]byte("0123456789"), 50_000)},
		{Title: "weights/model-2.bin", Content: bytes.Repeat([]byte("weights "), 1<<16)}, // whole blocks
		{Title: "archive.tar.gz", Content: gzipped(t, "inside", "packed").Blob},
		{Title: "archive.tar", Content: tarOf(t, "inside", "plain")},
		{Title: "empty", Content: nil},
		{Title: "copy.json", Content: []byte("{}")}, // the same blob under another name
		{Title: strings.Repeat("n", 200), Content: []byte("a long name")},
		{Content: []byte("no title")},
	}
}

// An artifact is stored with each driver as the files that it is made of, and survives a restart.
func TestArtifact(t *testing.T) {
	reg := registrytest.New(t)
	files := artifactFiles(t)
	top := reg.PutArtifact("model", "v1", modelType, files...)
	files[len(files)-1].Title = "sha256-" + digest.FromString("no title").Encoded()
	cfg := driversConfig(t)
	for _, driver := range []string{"directory", "erofs"} {
		t.Run(driver, func(t *testing.T) {
			s := restart(t, nil, with(cfg, driver, nil))
			img := mustPull(t, s, reg.Host()+"/model:v1")
			if img.Artifact == nil || img.Artifact.Type != modelType || img.Artifact.Manifest != top.Digest || len(img.Artifact.Files) != len(files) {
				t.Fatalf("artifact %+v", img.Artifact)
			}
			wantCode(t, img.CheckRunnable(), codes.FailedPrecondition, reg.Host()+"/model:v1", modelType, "image volume")
			wantArtifact(t, s, img, files)
			again := mustPull(t, s, reg.Host()+"/model:v1")
			if again.ID != img.ID {
				t.Errorf("pulled again: %s, was %s", again.ID, img.ID)
			}
			s = restart(t, s, with(cfg, driver, nil))
			kept, err := s.Get(img.ID)
			if err != nil || kept.Artifact == nil || kept.Artifact.Type != modelType {
				t.Fatalf("after a restart: %+v, %v", kept, err)
			}
			wantArtifact(t, s, kept, files)
			wantCode(t, s.Save(t.Context(), io.Discard, image.SaveOptions{Refs: []string{kept.ID}}), codes.FailedPrecondition, "artifact")
			testutil.Must(t, s.Remove(t.Context(), img.ID))
			wantEmpty(t, s)
			testutil.Must(t, s.Close())
		})
	}
}

// wantArtifact mounts an artifact and compares its files.
func wantArtifact(t *testing.T, s *node, img *image.Image, files []registrytest.File) {
	t.Helper()
	spec, err := s.Hold("reader", img.Layers)
	testutil.Must(t, err)
	defer func() { testutil.Must(t, s.Release("reader")) }()
	root := t.TempDir()
	testutil.Must(t, spec.MountAt(root))
	defer func() { testutil.Must(t, unix.Unmount(root, 0)) }()
	for i, f := range img.Artifact.Files {
		content, err := os.ReadFile(filepath.Join(root, f.Path))
		if err != nil || !bytes.Equal(content, files[i].Content) {
			t.Errorf("%s: %d bytes, %v; want %d", f.Path, len(content), err, len(files[i].Content))
		}
		if f.Path != files[i].Title {
			t.Errorf("file %d is %q, want %q", i, f.Path, files[i].Title)
		}
		if st, err := os.Stat(filepath.Join(root, f.Path)); err != nil || st.Mode() != 0o644 {
			t.Errorf("%s: mode %v, %v", f.Path, st.Mode(), err)
		}
	}
	entries, err := os.ReadDir(root)
	testutil.Must(t, err)
	if len(entries) != len(files)-1 { // two are in one directory
		t.Errorf("entries %v", entries)
	}
	for _, name := range img.Layers {
		restored, err := s.OpenLayer(name)
		testutil.Must(t, err)
		_, err = io.Copy(io.Discard, restored.Whole(t.Context()))
		testutil.Must(t, err)
		testutil.Must(t, restored.Close())
	}
}

// Artifacts of hostile authors are refused before anything is downloaded.
func TestArtifactFailures(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	reg.PutArtifact("good", "v1", modelType, registrytest.File{Title: "f", Content: []byte("content")})
	mustPull(t, s, reg.Host()+"/good:v1")
	many := make([]registrytest.File, 2000)
	for i := range many {
		many[i] = registrytest.File{Title: strings.Repeat("d/", 20) + string(rune('a'+i%26)) + strings.Repeat("x", i/26), Content: []byte("x")}
	}
	for name, files := range map[string][]registrytest.File{
		"traversal": {{Title: "../../etc/cron.d/x", Content: []byte("x")}},
		"absolute":  {{Title: "/etc/cron.d/x", Content: []byte("x")}},
		"twice":     {{Title: "f", Content: []byte("x")}, {Title: "f", Content: []byte("y")}},
		"below":     {{Title: "f", Content: []byte("x")}, {Title: "f/g", Content: []byte("y")}},
		"whiteout":  {{Title: ".wh.f", Content: []byte("x")}},
		"thousands": many,
	} {
		t.Run(name, func(t *testing.T) {
			reg.PutArtifact("hostile", name, modelType, files...)
			_, err := s.Pull(t.Context(), reg.Host()+"/hostile:"+name, nil)
			wantCode(t, err, codes.FailedPrecondition, "artifact")
		})
	}
	huge := reg.PutBlob("hostile", []byte("x"))
	reg.PutManifest("hostile", "huge", ocispec.MediaTypeImageManifest, fmt.Appendf(nil,
		`{"schemaVersion":2,"config":{"mediaType":%q,"digest":%q,"size":2},"layers":[{"digest":%q,"size":%d}]}`,
		ocispec.MediaTypeEmptyJSON, huge.Digest, huge.Digest, int64(1)<<50))
	_, err := s.Pull(t.Context(), reg.Host()+"/hostile:huge", nil)
	wantCode(t, err, codes.FailedPrecondition, "1125899906842624 bytes")
	if images := s.List(); len(images) != 1 || len(s.LayerForms()) != 1 {
		t.Errorf("%d images, %d layers", len(images), len(s.LayerForms()))
	}
}
