package statecheck

import (
	"archive/tar"
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
	"berth/image/unpack"
	"berth/image/unpack/checksum"
)

// storeOf is the layer of a store with one, whose only file f holds "content".
func storeOf(t *testing.T) layer.Stored {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Name: "f", Mode: 0o644, Size: 7, Typeflag: tar.TypeReg}))
	_, err := w.Write([]byte("content"))
	must(t, err)
	must(t, w.Close())
	root := t.TempDir()
	s, err := layer.Open(root, layer.NewDirectory(unpack.Layer), layer.Reserve{}, slog.New(slog.DiscardHandler))
	must(t, err)
	from := layer.Source{Blob: digest.FromString("blob"), DiffID: digest.FromBytes(b.Bytes())}
	must(t, s.Create(t.Context(), from, &b, unpack.Limits{}))
	must(t, s.Close())
	found, err := layer.Inspect(root)
	must(t, err)
	return found.Layers[from.Name()]
}

// A layer that holds other bytes, or other files, is named; of one without a checksum it is said what was not compared.
func TestBytes(t *testing.T) {
	for what, c := range map[string]struct {
		change  func(file string) error
		sum     bool
		found   string // in the only difference; empty: none
		skipped string
	}{
		"nothing":                  {func(string) error { return nil }, true, "", ""},
		"content":                  {func(file string) error { return os.WriteFile(file, []byte("CONTENT"), 0) }, true, "expected names, contents, owners and modes with the checksum", ""},
		"mode":                     {func(file string) error { return os.Chmod(file, 0o666) }, true, "with the checksum", ""},
		"one file less":            {os.Remove, true, "expected 2 files with", ""},
		"content, no checksum":     {func(file string) error { return os.WriteFile(file, []byte("CONTENT"), 0) }, false, "", "of 1 layers only the numbers"},
		"one file less, no sum":    {os.Remove, false, "expected 2 files with", "of 1 layers only the numbers"},
		"the tree":                 {func(file string) error { return os.RemoveAll(filepath.Dir(file)) }, true, "expected a layer that can be read", ""},
		"the layer, which is gone": {func(file string) error { return os.RemoveAll(filepath.Dir(filepath.Dir(file))) }, true, "", ""},
	} {
		stored := storeOf(t)
		must(t, c.change(filepath.Join(stored.Dir, "fs/f")))
		if !c.sum {
			stored.Sum = checksum.Sum{}
		}
		f := &facts{layers: &layer.Survey{Layers: map[digest.Digest]layer.Stored{stored.Layers[0]: stored}}}
		report := &Report{}
		must(t, compareBytes(t.Context(), f, report))
		switch {
		case c.found == "" && len(report.Differences) > 0:
			t.Errorf("%s: %v", what, report.Differences)
		case c.found != "" && (len(report.Differences) != 1 || !strings.Contains(report.Differences[0].String(), c.found)):
			t.Errorf("%s: %v, want %q", what, report.Differences, c.found)
		}
		if skipped := strings.Join(report.Skipped, ""); !strings.Contains(skipped, c.skipped) || c.skipped == "" && skipped != "" {
			t.Errorf("%s: skipped %q, want %q", what, skipped, c.skipped)
		}
	}
}
