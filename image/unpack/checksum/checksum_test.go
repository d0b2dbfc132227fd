package checksum_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/image/unpack/checksum"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// emptyTree opens an empty directory.
func emptyTree(t *testing.T) *os.File {
	t.Helper()
	root, err := safefs.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// makeTar returns the tar of the entries, which have the content if they have a size.
func makeTar(t *testing.T, content string, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&e); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content[:e.Size])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Every change to a tree changes its sum, except for times and extended attributes.
func TestOfDirectory(t *testing.T) {
	testutil.NeedRoot(t)
	entry := func(typ byte, name string) tar.Header { return tar.Header{Typeflag: typ, Name: name, Mode: 0o644} }
	regular, link, hard, device := entry(tar.TypeReg, "d/f"), entry(tar.TypeSymlink, "d/l"), entry(tar.TypeLink, "d/h"), entry(tar.TypeBlock, "d/b")
	regular.Size, link.Linkname, hard.Linkname, device.Devmajor, device.Devminor = 7, "f", "d/f", 7, 1
	other := regular
	other.Name, other.Size = "d/g", 0
	data := makeTar(t, "content", entry(tar.TypeDir, "d/"), regular, other, link, hard, device, entry(tar.TypeFifo, "implied/p"), entry(tar.TypeReg, "d/.wh.w"))
	for what, change := range map[string]func(dir string) error{
		"nothing":           func(string) error { return nil },
		"times":             func(dir string) error { return unix.Utimes(dir+"/d/f", []unix.Timeval{{Sec: 1}, {Sec: 2}}) },
		"content":           func(dir string) error { return os.WriteFile(dir+"/d/f", []byte("CONTENT"), 0) },
		"length":            func(dir string) error { return os.Truncate(dir+"/d/g", 1) },
		"mode":              func(dir string) error { return os.Chmod(dir+"/d/f", 0o645) },
		"mode of directory": func(dir string) error { return os.Chmod(dir+"/implied", 0o700) },
		"mode of root":      func(dir string) error { return os.Chmod(dir, 0o700) },
		"owner":             func(dir string) error { return os.Lchown(dir+"/d/l", 1, 0) },
		"group":             func(dir string) error { return os.Lchown(dir+"/d/b", 0, 1) },
		"name":              func(dir string) error { return os.Rename(dir+"/d/g", dir+"/d/i") },
		"place":             func(dir string) error { return os.Rename(dir+"/d/g", dir+"/g") },
		"one more":          func(dir string) error { return os.WriteFile(dir+"/new", nil, 0o644) },
		"one more name":     func(dir string) error { return os.Link(dir+"/d/f", dir+"/new") },
		"one less":          func(dir string) error { return os.Remove(dir + "/implied/p") },
		"one name less":     func(dir string) error { return os.Remove(dir + "/d/h") },
		"target": func(dir string) error {
			return replaced(dir+"/d/l", func(p string) error { return os.Symlink("g", p) })
		},
		"type": func(dir string) error {
			return replaced(dir+"/d/g", func(p string) error { return unix.Mkfifo(p, 0o644) })
		},
		"device": func(dir string) error {
			return replaced(dir+"/d/b", func(p string) error { return unix.Mknod(p, unix.S_IFBLK|0o644, 0x0702) })
		},
		"no whiteout":    func(dir string) error { return os.Remove(dir + "/d/w") },
		"other whiteout": func(dir string) error { return os.Rename(dir+"/d/w", dir+"/d/x") },
	} {
		root := emptyTree(t)
		result, err := unpack.Layer(context.Background(), root, bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
		if err != nil {
			t.Fatal(err)
		}
		if err := change(filepath.Clean(root.Name())); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		now, err := checksum.OfDirectory(context.Background(), root, func() {})
		if err != nil {
			t.Fatal(err)
		}
		if same := what == "nothing" || what == "times"; (now.Sum == result.Sum) != same {
			t.Errorf("%s: %s became %s", what, result.Sum, now.Sum)
		}
	}
}

func replaced(path string, with func(string) error) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	return with(path)
}

// Equal files do not cancel each other out.
func TestEqualFiles(t *testing.T) {
	var none, one, two checksum.Sum
	one.AddFile(unix.S_IFREG, 0, 0, 0, checksum.Content{})
	two.AddFile(unix.S_IFREG, 0, 0, 0, checksum.Content{})
	two.AddFile(unix.S_IFREG, 0, 0, 0, checksum.Content{})
	if none == one || none == two || one == two {
		t.Error(none, one, two)
	}
}

// Reading a tree keeps its access times and ends with its context.
func TestOfDirectoryLeavesNoTrace(t *testing.T) {
	root := emptyTree(t)
	path := root.Name() + "/f"
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	old := []unix.Timespec{{Sec: 1}, {Sec: 2}}
	if err := unix.UtimesNano(path, old); err != nil {
		t.Fatal(err)
	}
	if _, err := checksum.OfDirectory(context.Background(), root, func() {}); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || st.Atim != old[0] {
		t.Errorf("access time %v, %v", st.Atim, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := checksum.OfDirectory(ctx, root, func() {}); err == nil {
		t.Error("it was summed all the same")
	}
}

func TestInJSON(t *testing.T) {
	summary := unpack.Summary{Sum: checksum.Sum{1, 2, 3, 1<<64 - 1}}
	data, err := json.Marshal(summary)
	if err != nil {
		t.Fatal(err)
	}
	var got unpack.Summary
	if err := json.Unmarshal(data, &got); err != nil || got != summary {
		t.Errorf("%s became %+v, %v", data, got, err)
	}
	if data, err = json.Marshal(unpack.Summary{}); err != nil || bytes.Contains(data, []byte("sum")) {
		t.Errorf("no sum is %s, %v", data, err)
	}
	for _, text := range []string{`"12"`, `"x"`, `7`} {
		if err := json.Unmarshal([]byte(`{"sum":`+text+`}`), &got); err == nil {
			t.Errorf("%s was taken for a sum", text)
		}
	}
}
