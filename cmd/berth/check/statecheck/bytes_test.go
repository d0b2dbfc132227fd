package statecheck

import (
	"archive/tar"
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
	"berth/image/unpack"
	"berth/image/unpack/checksum"
	"berth/internal/testutil"
)

// file returns the header of the only file in the test's layers.
func file() tar.Header {
	return tar.Header{Name: "f", Mode: 0o644, Size: 7, Typeflag: tar.TypeReg, ModTime: time.Unix(1, 0), PAXRecords: map[string]string{"SCHILY.xattr.user.x": "1"}}
}

// storeOf returns the layer of a new store. Its only file contains "content".
func storeOf(t *testing.T, driver layer.Driver, file tar.Header) layer.Stored {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	testutil.Must(t, w.WriteHeader(&file))
	_, err := w.Write([]byte("content"))
	testutil.Must(t, err)
	testutil.Must(t, w.Close())
	root := t.TempDir()
	s, err := layer.Open(root, driver, layer.Reserve{}, nil, slog.New(slog.DiscardHandler))
	testutil.Must(t, err)
	from := layer.Source{Blob: digest.FromString("blob"), DiffID: digest.FromBytes(b.Bytes())}
	testutil.Must(t, s.Create(t.Context(), from, &b, unpack.Limits{}))
	testutil.Must(t, s.Close())
	found, err := layer.Inspect(root)
	testutil.Must(t, err)
	return found.Layers[from.Name()]
}

func TestBytes(t *testing.T) {
	testutil.NeedRoot(t)
	for what, c := range map[string]struct {
		change  func(file string) error
		sum     bool
		found   string // Found of the only difference; empty: no difference
		skipped string
	}{
		"nothing":                  {func(string) error { return nil }, true, "", ""},
		"content":                  {func(file string) error { return os.WriteFile(file, []byte("CONTENT"), 0) }, true, "expected names, contents, owners and modes with the checksum", ""},
		"mode":                     {func(file string) error { return os.Chmod(file, 0o666) }, true, "with the checksum", ""},
		"one file less":            {os.Remove, true, "expected 3 files with", ""},
		"content, no checksum":     {func(file string) error { return os.WriteFile(file, []byte("CONTENT"), 0) }, false, "", "of files and bytes of 1 layers"},
		"one file less, no sum":    {os.Remove, false, "expected 3 files with", "of files and bytes of 1 layers"},
		"the tree":                 {func(file string) error { return os.RemoveAll(filepath.Dir(file)) }, true, "expected a layer that can be read", ""},
		"the layer, which is gone": {func(file string) error { return os.RemoveAll(filepath.Dir(filepath.Dir(file))) }, true, "", ""},
	} {
		stored := storeOf(t, layer.NewDirectory(unpack.Layer), file())
		testutil.Must(t, c.change(filepath.Join(stored.Dir, "fs/f")))
		if !c.sum {
			stored.Sum = checksum.Sum{}
		}
		report := wantBytes(t, what, stored, c.found)
		if skipped := strings.Join(report.Skipped, ""); !strings.Contains(skipped, c.skipped) || c.skipped == "" && skipped != "" {
			t.Errorf("%s: skipped %q, want %q", what, skipped, c.skipped)
		}
	}
}

// wantBytes compares a layer. found is part of the only difference; empty: no difference.
func wantBytes(t *testing.T, what string, stored layer.Stored, found string) *Report {
	t.Helper()
	f := &facts{node: &Node{Root: t.TempDir()}, layers: &layer.Survey{Layers: map[digest.Digest]layer.Stored{stored.Layers[0]: stored}}}
	report := &Report{}
	testutil.Must(t, compareBytes(t.Context(), f, report))
	switch {
	case found == "" && len(report.Differences) > 0:
		t.Errorf("%s: %v", what, report.Differences)
	case found != "" && (len(report.Differences) != 1 || !strings.Contains(report.Differences[0].String(), found)):
		t.Errorf("%s: %v, want %q", what, report.Differences, found)
	}
	return report
}

func TestBytesOfPacked(t *testing.T) {
	packed := func(file tar.Header) layer.Stored { return storeOf(t, layer.NewEROFS(unpack.Pack, 0), file) }
	// treeOf replaces the layer's tree by another layer's tree.
	treeOf := func(change func(*tar.Header)) func(dir string) error {
		return func(dir string) error {
			other := file()
			change(&other)
			tree, err := os.ReadFile(filepath.Join(packed(other).Dir, "tree"))
			testutil.Must(t, err)
			return os.WriteFile(filepath.Join(dir, "tree"), tree, 0o600)
		}
	}
	const byDigest, bySum = "expected a list of its files with the digest sha256:", "expected names, contents, owners and modes with the checksum"
	xattr := treeOf(func(h *tar.Header) { h.PAXRecords["SCHILY.xattr.user.x"] = "2" })
	for what, c := range map[string]struct {
		change func(dir string) error
		digest bool
		found  string
	}{
		"nothing":           {func(string) error { return nil }, true, ""},
		"content":           {contentIn("CONTENT"), true, bySum},
		"mode":              {treeOf(func(h *tar.Header) { h.Mode = 0o755 }), true, byDigest},
		"xattr":             {xattr, true, byDigest},
		"time":              {treeOf(func(h *tar.Header) { h.ModTime = time.Unix(2, 0) }), true, byDigest},
		"no tree":           {func(dir string) error { return os.Remove(filepath.Join(dir, "tree")) }, true, "expected a layer that can be read"},
		"a damaged tree":    {func(dir string) error { return damage(filepath.Join(dir, "tree")) }, true, byDigest},
		"mode, no digest":   {treeOf(func(h *tar.Header) { h.Mode = 0o755 }), false, bySum},
		"xattr, no digest":  {xattr, false, ""},
		"an endless tree":   {func(dir string) error { return os.Truncate(filepath.Join(dir, "tree"), 1<<40) }, true, ", more than the"},
		"damage, no digest": {func(dir string) error { return damage(filepath.Join(dir, "tree")) }, false, "expected a layer that can be read"},
	} {
		stored := packed(file())
		testutil.Must(t, c.change(stored.Dir))
		if stored.Tree == "" {
			t.Fatal("no digest of the tree was noted")
		}
		if !c.digest {
			stored.Tree = ""
		}
		wantBytes(t, what, stored, c.found)
	}
}

// contentIn replaces the beginning of a layer's data.
func contentIn(content string) func(dir string) error {
	return func(dir string) error {
		f, err := os.OpenFile(filepath.Join(dir, "data"), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(content)
		return errors.Join(err, f.Close())
	}
}

// damage changes the first byte of a file.
func damage(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	data[0] ^= 1
	return os.WriteFile(path, data, 0o600)
}

// The content of an incomplete layer is not compared. The report says so.
func TestBytesOfIncompleteLayer(t *testing.T) {
	name := digest.FromString("layer")
	f := &facts{node: &Node{Root: t.TempDir()}, layers: &layer.Survey{Layers: map[digest.Digest]layer.Stored{name: {Dir: t.TempDir(), Incomplete: true}}}}
	var report Report
	testutil.Must(t, compareBytes(t.Context(), f, &report))
	if len(report.Differences) > 0 || len(report.Skipped) != 1 || !strings.Contains(report.Skipped[0], "1 layers are not complete") {
		t.Errorf("%+v", report)
	}
}
