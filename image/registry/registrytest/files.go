package registrytest

import (
	"os"
	"path/filepath"
	"testing"
)

// WriteFile writes a file, creates its parent directories and returns its path.
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
