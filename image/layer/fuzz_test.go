package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// fuzzStore is a store on a tmpfs of its own, with a canary beside it.
type fuzzStore struct {
	*Store
	outside string
	canary  map[string]string
}

func newFuzzStore(t testing.TB) *fuzzStore {
	t.Helper()
	outside := t.TempDir()
	testutil.Must(t, unix.Mount("tmpfs", outside, "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { testutil.Must(t, unix.Unmount(outside, 0)) })
	testutil.Must(t, os.Mkdir(outside+"/dir", 0o700))
	testutil.Must(t, os.WriteFile(outside+"/secret", []byte("secret"), 0o600))
	s, err := Open(outside+"/store", NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, s.Close()) })
	f := &fuzzStore{Store: s, outside: outside}
	f.canary = f.watched(t)
	return f
}

// watched describes the files that a layer must not be able to change.
func (f *fuzzStore) watched(t testing.TB) map[string]string {
	t.Helper()
	all := map[string]string{}
	inodes := map[uint64]string{}
	for _, e := range slices.Concat(entries(t, f.outside), []string{"dir/.", "store/empty-directory/fs"}) {
		if e == "store" {
			continue
		}
		all[e] = attributes(t, filepath.Join(f.outside, e), inodes)
	}
	for _, e := range entries(t, f.outside, "store") {
		all["store/"+e] = ""
	}
	return all
}

// check checks what must be true after any unpacking.
func (f *fuzzStore) check(t testing.TB) {
	t.Helper()
	compareTrees(t, f.watched(t), f.canary)
	expectEmpty(t, f.root+"/tmp")
	for _, info := range f.layers.All() {
		path := filepath.Join(f.layerDir(info.DiffID), treeDir)
		checkTree(t, path, info.Usage)
		testutil.Must(t, filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
			testutil.Must(t, err)
			for name, value := range xattrs(t, path) {
				if strings.HasPrefix(name, "trusted.") && (name != unpack.OpaqueXattr || value != "y" || !d.IsDir()) || strings.HasPrefix(name, "user.overlay") {
					t.Errorf("%s has %s=%q", path, name, value)
				}
			}
			return nil
		}))
	}
}

// FuzzApply unpacks arbitrary bytes.
func FuzzApply(f *testing.F) {
	for _, seed := range [][]header{
		base(),
		{symlink("l", "../.."), file("l/secret", "owned"), hardlink("h", "l/secret")},
		{file("a/.wh..wh..opq", ""), file(".wh.b", ""), device(tar.TypeChar, "c", 0, 0), hardlink("x", "etc/passwd")},
		{file("f", "x").xattr("trusted.overlay.redirect", "/etc").xattr("user.a", "b"), mode(file("s", "x").owned(1, 2), 0o6755)},
		{gnu(file(strings.Repeat("long/", 50)+"f", "x")), symlink("y", strings.Repeat("t", 300))},
	} {
		f.Add(makeTar(f, seed...))
	}
	f.Add(sparseBomb(f))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newFuzzStore(t)
		bottom := create(t, s.Store, makeTar(t, base()...))
		id := digest.FromBytes(data)
		err := s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{Tar: 16 << 20, Bytes: 16 << 20, Entries: 1000})
		if code := errdefs.Code(err); code != codes.OK && code != codes.InvalidArgument && code != codes.FailedPrecondition {
			t.Fatalf("%v: %v", code, err)
		}
		if err == nil {
			checkSum(t, s.Store, id)
			checkStack(t, s.Store, bottom, id)
		}
		s.check(t)
	})
}

const randomPrograms = 300

// fuzzNames are few, so that entries conflict.
var fuzzNames = []string{
	"a", "b", "a/b", "b/a", "a/b/c", "b/a/c", "l", "l/a", "l/b/c", "a/l", "a/l/b", ".", "../secret", "/a", "a/../b", "e", "e/f",
	".wh.a", ".wh.b", ".wh.l", "a/.wh.b", "l/.wh.a", "a/b/.wh.c", ".wh..wh..opq", "a/.wh..wh..opq", "a/b/.wh..wh..opq", "l/.wh..wh..opq", ".wh.e",
}

// fuzzTargets are targets of links.
var fuzzTargets = []string{"a", "b", "/a/b", "..", "../../..", "l", "a/b", "b/a/c", "/", ".", "../secret", "e/f", "no/where", "a/l", "/dir"}

// program converts bytes to the entries of a few layers.
func program(data []byte) [][]header {
	layers := [][]header{nil}
	for len(data) >= 3 && len(layers) <= 4 {
		kind, name, target := data[0], fuzzNames[int(data[1])%len(fuzzNames)], fuzzTargets[int(data[2])%len(fuzzTargets)]
		data = data[3:]
		top := &layers[len(layers)-1]
		switch kind % 8 {
		case 0, 1:
			*top = append(*top, file(name, target))
		case 2:
			*top = append(*top, dir(name, int64(data2mode(kind))).owned(int(kind), 0))
		case 3:
			*top = append(*top, symlink(name, target))
		case 4:
			*top = append(*top, hardlink(name, target))
		case 5:
			*top = append(*top, device(tar.TypeChar, name, 0, 0))
		case 6:
			*top = append(*top, device(tar.TypeFifo, name, 0, 0))
		case 7:
			layers = append(layers, nil)
		}
	}
	return layers
}

func data2mode(kind byte) int { return 0o700 | int(kind)%0o100 }

// FuzzLayers unpacks layers with conflicting entries. It compares the driver's view of their stack
// with the kernel's.
func FuzzLayers(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00\x02\x00\x07\x00\x00\x04\x01\x06\x00\x11\x00"))
	f.Add([]byte("\x00\x04\x00\x03\x06\x00\x07\x00\x00\x00\x07\x00\x04\x08\x01\x07\x00\x00\x02\x00\x00\x00\x14\x00"))
	f.Add([]byte("\x00\x10\x00\x07\x00\x00\x04\x00\x0b\x05\x10\x00\x07\x00\x00\x00\x17\x00\x04\x01\x0b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newFuzzStore(t)
		var chain []digest.Digest
		for _, l := range program(data) {
			if id := createMalicious(t, s.Store, makeTar(t, l...)); id != "" {
				chain = append(chain, id)
			}
		}
		if len(chain) > 0 {
			checkStack(t, s.Store, chain...)
		}
		s.check(t)
	})
}

// checkStack mounts a chain, if it can be, and compares the mount with a view.
func checkStack(t testing.TB, s *Store, chain ...digest.Digest) {
	t.Helper()
	layers, err := s.Stack(context.Background(), chain)
	if err != nil {
		if errdefs.Code(err) != codes.InvalidArgument {
			t.Fatal(err)
		}
		return
	}
	if hasTwins(layers) {
		return // overlayfs takes no layer twice
	}
	var trees []string
	for _, l := range slices.Backward(layers) {
		trees = append(trees, l.Path)
	}
	v, err := openView(newEffort(context.Background(), allEffort), trees)
	testutil.Must(t, err)
	defer v.close()
	root := t.TempDir()
	testutil.Must(t, rootfs.Spec{Layers: layers}.MountAt(root))
	defer func() { testutil.Must(t, unix.Unmount(root, 0)) }()
	compareView(t, v, v.root, root)
}

func hasTwins(layers []rootfs.Layer) bool {
	seen := map[string]bool{}
	for _, l := range layers {
		if seen[l.Path] {
			return true
		}
		seen[l.Path] = true
	}
	return false
}

// compareView compares a directory of a view with the kernel's.
func compareView(t testing.TB, v *view, dir found, path string) {
	t.Helper()
	names := map[string]bool{}
	for _, e := range entries(t, path) {
		names[e] = true
	}
	for _, layer := range dir.layers {
		d, err := v.open(layer, dir.path)
		testutil.Must(t, err)
		list, err := d.Names()
		testutil.Must(t, err)
		testutil.Must(t, d.Close())
		for _, name := range list {
			names[name] = true
		}
	}
	for name := range names {
		compareEntry(t, v, dir, name, filepath.Join(path, name))
	}
}

func compareEntry(t testing.TB, v *view, dir found, name, path string) {
	t.Helper()
	var st unix.Stat_t
	kernel := unix.Lstat(path, &st)
	f, err := v.child(dir, name)
	if errors.Is(err, unix.ENOENT) && kernel == unix.ENOENT {
		return
	}
	if err != nil || kernel != nil {
		t.Errorf("%s: %v; the kernel says %v", path, err, kernel)
		return
	}
	if st.Mode != f.st.Mode || st.Uid != f.st.Uid || !f.isDir() && st.Ino != f.st.Ino {
		t.Errorf("%s: mode %o owner %d inode %d; the kernel says %o %d %d", path, f.st.Mode, f.st.Uid, f.st.Ino, st.Mode, st.Uid, st.Ino)
	}
	if f.isDir() {
		compareView(t, v, f, path)
	}
}

// TestRandomLayers is FuzzLayers on random programs, which are longer than those
// a fuzzer starts with.
func TestRandomLayers(t *testing.T) {
	s := newFuzzStore(t)
	for seed := range uint64(randomPrograms) {
		r := rand.New(rand.NewPCG(seed, 7))
		data := make([]byte, 3*(1+r.IntN(40)))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		var chain []digest.Digest
		for _, l := range program(data) {
			if id := createMalicious(t, s.Store, makeTar(t, l...)); id != "" {
				chain = append(chain, id)
			}
		}
		if len(chain) > 0 {
			checkStack(t, s.Store, chain...)
		}
		s.check(t)
		for _, id := range chain {
			testutil.Must(t, s.Remove(id))
		}
		if t.Failed() {
			t.Fatalf("seed %d: %+v", seed, program(data))
		}
	}
}
