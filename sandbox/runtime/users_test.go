package runtime

import (
	"os"
	"path/filepath"
	"testing"

	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// The user files of an incomplete image come from a table of contents that may be wrong. They must
// not decide the users of later containers.
func TestUserFilesOfIncompleteImageAreNotCached(t *testing.T) {
	testutil.NeedRoot(t)
	var users Users
	read := func(content string, keep []*os.File) string {
		t.Helper()
		layer := t.TempDir()
		testutil.Must(t, os.Mkdir(filepath.Join(layer, "etc"), 0o755))
		testutil.Must(t, os.WriteFile(filepath.Join(layer, "etc/passwd"), []byte(content), 0o644))
		root := rootfs.Spec{Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: layer}}, Keep: keep}
		files, err := users.Of("image", root)
		testutil.Must(t, err)
		return string(files.Passwd)
	}
	if got := read("wrong", []*os.File{os.Stdin}); got != "wrong" {
		t.Errorf("incomplete image: %q", got)
	}
	if got := read("right", nil); got != "right" {
		t.Errorf("complete image: %q", got)
	}
	if got := read("changed", nil); got != "right" {
		t.Errorf("complete image is not cached: %q", got)
	}
}
