package archive

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"berth/internal/testutil"
)

// syncAll reaches every file of the manifest: one that is missing is an error.
func TestSync(t *testing.T) {
	path := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(path, "one/checkpoint"), 0o700))
	manifest := &Manifest{}
	for _, name := range []string{"pod.dump", "one/config.dump", "one/checkpoint/pages-1.img"} {
		testutil.Must(t, os.WriteFile(filepath.Join(path, name), []byte("x"), 0o600))
		manifest.Files = append(manifest.Files, File{Path: name})
	}
	testutil.Must(t, os.WriteFile(filepath.Join(path, newManifest), []byte("{}"), 0o600))
	dir, err := os.Open(path)
	testutil.Must(t, err)
	defer dir.Close()
	testutil.Must(t, syncAll(t.Context(), dir, manifest))
	testutil.Must(t, os.Remove(filepath.Join(path, "one/checkpoint/pages-1.img")))
	if err := syncAll(t.Context(), dir, manifest); err == nil {
		t.Error("a missing file was synced")
	}
}

// The manifest gets its name last. If the archive cannot be synced, it has none.
func TestManifestIsLast(t *testing.T) {
	path := t.TempDir()
	dir := openDir(t, path)
	for _, name := range []string{ConfigFile, SpecFile, "checkpoint/inventory.img", "checkpoint/descriptors.json"} {
		put(t, filepath.Join(path, "web", name), "{}")
	}
	ctx, cancel := context.WithCancel(t.Context())
	m := manifest(true, "web")
	testutil.Must(t, Seal(ctx, dir, m, newKey(t), nil, true))
	if left, err := os.ReadDir(path); err != nil || len(left) != 4 || left[0].Name() != ManifestFile {
		t.Errorf("files %v, %v", left, err)
	}
	testutil.Must(t, os.Rename(filepath.Join(path, ManifestFile), filepath.Join(path, newManifest)))
	cancel()
	if err := syncAll(ctx, dir, m); err == nil {
		t.Error("synced after the end of the context")
	}
	if _, err := Import(t.Context(), dir, openDir(t, t.TempDir()), nil); err == nil {
		t.Error("an archive whose manifest has no name yet was imported")
	}
}
