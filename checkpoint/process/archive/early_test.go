package archive

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// A file that is hashed while it grows has the hash of its whole content, wherever the early
// hashing ends. Import compares it.
func TestEarlyHashes(t *testing.T) {
	t.Parallel()
	const unit = "0123456789abcdef"
	for _, tc := range []struct {
		name        string
		early, late int // bytes before and after the end of the early hashing, in units
	}{
		{"nothing early", 0, 1000},
		{"a part", 3 * earlyChunk / len(unit), 777},
		{"a part of a chunk", 5, 1},
		{"everything", 2 * earlyChunk / len(unit), 0},
		{"an empty file", 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			key := newKey(t)
			path := sealed(t, key, false, "web")
			testutil.Must(t, os.Remove(filepath.Join(path, ManifestFile)))
			pages := filepath.Join(path, ImagesDir, "pages-1.img")
			testutil.Must(t, os.Truncate(pages, 0))
			dir := openDir(t, path)
			early := NewEarly(dir)
			defer early.Close()
			appendTo(t, pages, strings.Repeat(unit, tc.early/2))
			early.find(ImagesDir)
			early.advance()
			appendTo(t, pages, strings.Repeat(unit, tc.early-tc.early/2))
			for early.advance() {
			}
			if got := early.files[ImagesDir+"/pages-1.img"].n; got != int64(tc.early*len(unit)) {
				t.Errorf("%d bytes are hashed early, want %d", got, tc.early*len(unit))
			}
			appendTo(t, pages, strings.Repeat(unit, tc.late))
			m := manifest(false, "web")
			testutil.Must(t, Seal(t.Context(), dir, m, key, early, false))
			f, ok := m.file(ImagesDir + "/pages-1.img")
			if want := int64((tc.early + tc.late) * len(unit)); !ok || f.Size != want {
				t.Errorf("size %d, want %d", f.Size, want)
			}
			if _, _, err := imported(t, path, key); err != nil {
				t.Error(err)
			}
		})
	}
}

func appendTo(t *testing.T, path, content string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	testutil.Must(t, err)
	_, err = f.WriteString(content)
	testutil.Must(t, err)
	testutil.Must(t, f.Close())
}
