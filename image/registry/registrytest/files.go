package registrytest

import (
	"os"
	"path/filepath"
	"testing"
)

// WriteFile writes a file, with the folders it is in, and returns its path.
func WriteFile(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
