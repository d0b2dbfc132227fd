package archive

import (
	"os"
	"path/filepath"
	"testing"

	"berth/internal/testutil"
)

// Sync reaches every file of the manifest: one that is missing is an error.
func TestSync(t *testing.T) {
	path := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(path, "one/checkpoint"), 0o700))
	manifest := &Manifest{}
	for _, name := range []string{"pod.dump", "one/config.dump", "one/checkpoint/pages-1.img"} {
		testutil.Must(t, os.WriteFile(filepath.Join(path, name), []byte("x"), 0o600))
		manifest.Files = append(manifest.Files, File{Path: name})
	}
	testutil.Must(t, os.WriteFile(filepath.Join(path, ManifestFile), []byte("{}"), 0o600))
	dir, err := os.Open(path)
	testutil.Must(t, err)
	defer dir.Close()
	testutil.Must(t, Sync(t.Context(), dir, manifest))
	testutil.Must(t, os.Remove(filepath.Join(path, "one/checkpoint/pages-1.img")))
	if err := Sync(t.Context(), dir, manifest); err == nil {
		t.Error("a missing file was synced")
	}
}
