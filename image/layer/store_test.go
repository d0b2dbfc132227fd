package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

func TestCreate(t *testing.T) {
	s := openStore(t, t.TempDir())
	data := makeTar(t, dir("a", 0o755), file("a/b", "content"))
	id := digest.FromBytes(data)
	if s.Has(id) {
		t.Fatal("there before it was made")
	}
	if _, err := s.Info(id); errdefs.Code(err) != codes.NotFound {
		t.Errorf("info: %v", err)
	}
	testutil.Must(t, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
	info, err := s.Info(id)
	testutil.Must(t, err)
	if !s.Has(id) || info.DiffID != id || info.TarBytes != int64(len(data)) || info.Inodes != 4 || info.Bytes != 4*4096 {
		t.Errorf("%+v", info)
	}
	if list := s.List(); !slices.Equal(list, []digest.Digest{id}) {
		t.Errorf("list %v", list)
	}
	if s.Usage() != info.Usage {
		t.Errorf("usage %+v, want %+v", s.Usage(), info.Usage)
	}
	// The second time nothing is read.
	testutil.Must(t, s.Create(context.Background(), Source{DiffID: id}, iotest.ErrReader(errors.New("read")), unpack.Limits{}))
}

// All of the stream counts for the diffID, also what comes after the archive's end.
func TestTrailingBytes(t *testing.T) {
	s := openStore(t, t.TempDir())
	data := makeTar(t, file("a", "1"))
	for _, tail := range []string{"x", strings.Repeat("\x00", 10240), strings.Repeat("garbage", 1<<20)} {
		id := create(t, s, append(slices.Clone(data), tail...))
		info, err := s.Info(id)
		testutil.Must(t, err)
		if info.TarBytes != int64(len(data)+len(tail)) {
			t.Errorf("%d bytes, want %d", info.TarBytes, len(data)+len(tail))
		}
	}
	cut := data[:len(data)-1024] // without an end marker
	create(t, s, cut)
}

func TestCreateErrors(t *testing.T) {
	good := makeTar(t, dir("a", 0o755), file("a/b", "content"))
	broken := errors.New("connection reset")
	long := strings.Repeat("x/", 2049) + "x"
	cases := []struct {
		name   string
		tar    io.Reader
		limits unpack.Limits
		code   codes.Code
		text   string
	}{
		{"wrong diffID", bytes.NewReader(good), unpack.Limits{}, codes.DataLoss, digest.FromBytes(good).String()},
		{"truncated in a header", bytes.NewReader(good[:700]), unpack.Limits{}, codes.InvalidArgument, "unexpected EOF"},
		{"truncated in content", bytes.NewReader(good[:1024+3]), unpack.Limits{}, codes.InvalidArgument, "a/b"},
		{"reader fails", io.MultiReader(bytes.NewReader(good[:700]), iotest.ErrReader(broken)), unpack.Limits{}, codes.Unknown, "connection reset"},
		{"reader fails behind the archive", io.MultiReader(bytes.NewReader(good), iotest.ErrReader(broken)), unpack.Limits{}, codes.Unknown, "connection reset"},
		{"reader ends unexpectedly behind the archive", io.MultiReader(bytes.NewReader(good), iotest.ErrReader(io.ErrUnexpectedEOF)), unpack.Limits{}, codes.Unknown, "unexpected EOF"},
		{"no tar", strings.NewReader(strings.Repeat("no tar", 1000)), unpack.Limits{}, codes.InvalidArgument, "invalid tar header"},
		{"too long", bytes.NewReader(good), unpack.Limits{Tar: 1000}, codes.FailedPrecondition, "the 1000 bytes allowed"},
		{"endless", io.MultiReader(bytes.NewReader(good), zeros{}), unpack.Limits{Tar: 10 << 20}, codes.FailedPrecondition, "bytes allowed"},
		{"too many entries", bytes.NewReader(good), unpack.Limits{Entries: 1}, codes.FailedPrecondition, "more than the 1 entries"},
		{"large sparse file", bytes.NewReader(sparseBomb(t)), unpack.Limits{Bytes: 1 << 30}, codes.FailedPrecondition, "its files are larger"},
		{"long name", bytes.NewReader(makeTar(t, file(long, ""))), unpack.Limits{}, codes.InvalidArgument, "file name too long"},
		{"long component", bytes.NewReader(makeTar(t, file(strings.Repeat("x", 256), ""))), unpack.Limits{}, codes.InvalidArgument, "file name too long"},
		{"long through symlinks", bytes.NewReader(makeTar(t, dir(long[:3999], 0o755), symlink("l", long[:3999]), file("l/"+long[:200]+"f", ""))), unpack.Limits{}, codes.InvalidArgument, "file name too long"},
		{"long symlink", bytes.NewReader(makeTar(t, symlink("l", strings.Repeat("x", 4096)))), unpack.Limits{}, codes.InvalidArgument, "file name too long"},
		{"empty symlink", bytes.NewReader(makeTar(t, symlink("l", ""))), unpack.Limits{}, codes.InvalidArgument, "without a target"},
		{"symlink loop", bytes.NewReader(makeTar(t, symlink("l", "l"), file("l/x", ""))), unpack.Limits{}, codes.InvalidArgument, "too many levels"},
		{"below a file", bytes.NewReader(makeTar(t, file("a", ""), file("a/b", ""))), unpack.Limits{}, codes.InvalidArgument, "not a directory"},
		{"below a device", bytes.NewReader(makeTar(t, device(tar.TypeChar, "a", 1, 3), file("a/b", ""))), unpack.Limits{}, codes.InvalidArgument, "not a directory"},
		{"root is a file", bytes.NewReader(makeTar(t, file(".", ""))), unpack.Limits{}, codes.InvalidArgument, "root is no directory"},
		{"root is a symlink", bytes.NewReader(makeTar(t, symlink("/", "/etc"))), unpack.Limits{}, codes.InvalidArgument, "root is no directory"},
		{"hard link to a directory", bytes.NewReader(makeTar(t, dir("a", 0o755), hardlink("b", "a"))), unpack.Limits{}, codes.InvalidArgument, "hard link to the directory"},
		{"root is a hard link", bytes.NewReader(makeTar(t, file("a", ""), hardlink("/", "a"))), unpack.Limits{}, codes.InvalidArgument, "root is no directory"},
		{"hard link to the root", bytes.NewReader(makeTar(t, hardlink("b", "../.."))), unpack.Limits{}, codes.InvalidArgument, "hard link to"},
		{"whiteout of nothing", bytes.NewReader(makeTar(t, file("a/.wh.", ""))), unpack.Limits{}, codes.InvalidArgument, "whiteout of nothing"},
		{"whiteout of .", bytes.NewReader(makeTar(t, file("a/.wh..", ""))), unpack.Limits{}, codes.InvalidArgument, "whiteout of nothing"},
		{"whiteout of ..", bytes.NewReader(makeTar(t, file("a/.wh...", ""))), unpack.Limits{}, codes.InvalidArgument, "whiteout of nothing"},
		{"user -1", bytes.NewReader(makeTar(t, gnu(file("a", "").owned(-1, 0)))), unpack.Limits{}, codes.InvalidArgument, "owner -1:0"},
		{"group 2^32-1", bytes.NewReader(makeTar(t, dir("a", 0o755).owned(0, 1<<32-1))), unpack.Limits{}, codes.InvalidArgument, "owner 0:4294967295"},
		{"user 2^32", bytes.NewReader(makeTar(t, symlink("a", "b").owned(1<<32, 0))), unpack.Limits{}, codes.InvalidArgument, "owner 4294967296:0"},
		{"device number", bytes.NewReader(makeTar(t, device(tar.TypeBlock, "a", 1<<12, 0))), unpack.Limits{}, codes.InvalidArgument, "device number 4096:0"},
		{"unknown type", bytes.NewReader(makeTar(t, withType(file("a", ""), 'V'))), unpack.Limits{}, codes.InvalidArgument, "unknown type 'V'"},
		{"large attribute", bytes.NewReader(makeTar(t, file("a", "").xattr("user.a", strings.Repeat("v", 64<<10+1)))), unpack.Limits{}, codes.InvalidArgument, `"user.a" of 65537 bytes`},
		{"long attribute", bytes.NewReader(makeTar(t, file("a", "").xattr("user."+strings.Repeat("v", 256), ""))), unpack.Limits{}, codes.InvalidArgument, "user.vvv"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			s := openStore(t, root)
			id := digest.FromString(c.name)
			err := s.Create(context.Background(), Source{DiffID: id}, c.tar, c.limits)
			if errdefs.Code(err) != c.code || !strings.Contains(fmt.Sprint(err), c.text) || !strings.Contains(fmt.Sprint(err), id.String()) {
				t.Errorf("%v: %v; want %v with %q", errdefs.Code(err), err, c.code, c.text)
			}
			if s.Has(id) || s.Usage() != (Usage{}) {
				t.Errorf("it is there: %+v", s.Usage())
			}
			expectEmpty(t, filepath.Join(root, "layers"), filepath.Join(root, "tmp"))
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// sparseBomb is the tar of a sparse file of 1 TiB that has no data.
func sparseBomb(t testing.TB) []byte {
	t.Helper()
	path := t.TempDir() + "/hole"
	testutil.Must(t, os.WriteFile(path, nil, 0o644))
	testutil.Must(t, os.Truncate(path, 1<<40))
	out, err := exec.Command("tar", "-C", filepath.Dir(path), "--sparse", "-c", "hole").Output()
	testutil.Must(t, err)
	return out
}

func expectEmpty(t testing.TB, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("in %s: %v, %v", dir, entries, err)
		}
	}
}

func TestBadDiffID(t *testing.T) {
	s := openStore(t, t.TempDir())
	for _, id := range []digest.Digest{"", "sha256:../../etc", "sha256:abc", "md5:d41d8cd98f00b204e9800998ecf8427e", "../x"} {
		if err := s.Create(context.Background(), Source{DiffID: id}, strings.NewReader(""), unpack.Limits{}); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%q: %v", id, err)
		}
		testutil.Must(t, s.Remove(id))
		if s.Has(id) {
			t.Errorf("%q is there", id)
		}
	}
}

func TestSHA512(t *testing.T) {
	s := openStore(t, t.TempDir())
	data := makeTar(t, file("a", "1"))
	testutil.Must(t, s.Create(context.Background(), Source{DiffID: digest.SHA512.FromBytes(data)}, bytes.NewReader(data), unpack.Limits{}))
}

func TestCancel(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	data := makeTar(t, file("a", "1"), file("b", strings.Repeat("2", 1<<20)))
	ctx, cancel := context.WithCancel(context.Background())
	// The reader cancels in the middle and goes on, as one that does not look at ctx would.
	in := io.MultiReader(bytes.NewReader(data[:2000]), readerFunc(func([]byte) (int, error) { cancel(); return 0, io.EOF }), bytes.NewReader(data[2000:]), zeros{})
	if err := s.Create(ctx, Source{DiffID: digest.FromBytes(data)}, in, unpack.Limits{}); !errors.Is(err, context.Canceled) || errdefs.Code(err) != codes.Canceled {
		t.Errorf("canceled: %v", err)
	}
	expectEmpty(t, filepath.Join(root, "layers"), filepath.Join(root, "tmp"))
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// watched is the directory driver. It reports removals.
type watched struct {
	*Directory
	removed chan string
}

func (w watched) Remove(ctx context.Context, dir string) error {
	err := w.Directory.Remove(ctx, dir)
	w.removed <- dir
	return err
}

func openWatched(t testing.TB, root string) (*Store, <-chan string) {
	t.Helper()
	w := watched{NewDirectory(unpack.Layer), make(chan string, 100)}
	s, err := Open(root, w, Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, s.Close()) })
	return s, w.removed
}

// await waits for n removals and returns the last.
func await(t testing.TB, removed <-chan string, n int) (last string) {
	t.Helper()
	for i := range n {
		select {
		case last = <-removed:
		case <-time.After(time.Minute):
			t.Fatalf("%d of %d removals", i, n)
		}
	}
	return last
}

func TestRemove(t *testing.T) {
	root := t.TempDir()
	s, removed := openWatched(t, root)
	bottom := create(t, s, makeTar(t, dir(".", 0o711), file("a", "1")))
	top := create(t, s, makeTar(t, hardlink("b", "a")))
	other := create(t, s, makeTar(t, file("c", "1")))
	for _, chain := range [][]digest.Digest{{bottom, top}, {bottom, other}, {bottom, top, other}} {
		_, err := s.Stack(context.Background(), chain)
		testutil.Must(t, err)
	}
	if n := len(entries(t, root, "joins")); n != 3 {
		t.Errorf("%d joins, want 3", n)
	}
	testutil.Must(t, s.Remove(top))
	testutil.Must(t, s.Remove(top))
	await(t, removed, 3) // the layer and two of the joins
	if s.Has(top) || len(entries(t, root, "layers")) != 2 || len(entries(t, root, "joins")) != 1 {
		t.Errorf("layers %v, joins %v", entries(t, root, "layers"), entries(t, root, "joins"))
	}
	expectEmpty(t, filepath.Join(root, "trash"))
	testutil.Must(t, s.Remove(bottom))
	testutil.Must(t, s.Remove(other))
	if len(s.joins.All()) != 0 {
		t.Errorf("joins %v", s.joins.All())
	}
	await(t, removed, 3)
	expectEmpty(t, filepath.Join(root, "trash"), filepath.Join(root, "layers"), filepath.Join(root, "joins"))
	create(t, s, makeTar(t, hardlink("b", "a"))) // may come again
}

// blocked is a driver whose deletions wait until the test allows them.
type blocked struct {
	*Directory
	goOn chan struct{}
}

func (b blocked) Remove(ctx context.Context, dir string) error {
	<-b.goOn
	return b.Directory.Remove(ctx, dir)
}

// Usage includes layers under construction and layers under deletion.
func TestUsageOfUnfinished(t *testing.T) {
	goOn := make(chan struct{})
	s, err := Open(t.TempDir(), blocked{NewDirectory(unpack.Layer), goOn}, Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	data := makeTar(t, file("a", strings.Repeat("x", 10_000)))
	var reached Usage
	end := readerFunc(func([]byte) (int, error) { reached = s.Usage(); return 0, io.EOF })
	id := digest.FromBytes(data)
	testutil.Must(t, s.Create(context.Background(), Source{DiffID: id}, io.MultiReader(bytes.NewReader(data), end), unpack.Limits{}))
	if want := (Usage{Bytes: uint64(len(data))}); reached != want {
		t.Errorf("while it is made: %+v, want %+v", reached, want)
	}
	info, err := s.Info(id)
	testutil.Must(t, err)
	if s.Usage() != info.Usage {
		t.Errorf("when it is made: %+v, want %+v", s.Usage(), info.Usage)
	}
	testutil.Must(t, s.Remove(id))
	if s.Usage() != info.Usage {
		t.Errorf("while it is deleted: %+v, want %+v", s.Usage(), info.Usage)
	}
	goOn <- struct{}{}
	for deadline := time.Now().Add(time.Minute); s.Usage() != (Usage{}); {
		if time.Now().After(deadline) {
			t.Fatalf("when it is deleted: %+v", s.Usage())
		}
	}
	other := t.TempDir()
	testutil.Must(t, s.Discard(other, info.Usage))
	if s.Usage() != info.Usage || s.Deleting() != info.Usage {
		t.Errorf("while a directory is discarded: %+v, deleting %+v; want %+v", s.Usage(), s.Deleting(), info.Usage)
	}
	goOn <- struct{}{}
	testutil.Must(t, s.Close())
}

func TestCloseDoesNotWaitForHangingDeletion(t *testing.T) {
	root, dir := t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		s, err := Open(root, blocked{NewDirectory(unpack.Layer), goOn}, Reserve{}, nil, discardLog())
		testutil.Must(t, err)
		testutil.Must(t, s.Discard(dir, Usage{}))
		synctest.Wait() // the deletion hangs
		began := time.Now()
		if err := s.Close(); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != closeTimeout {
			t.Errorf("closed after %v: %v", time.Since(began), err)
		}
		goOn <- struct{}{}
	})
}

func entries(t testing.TB, elem ...string) []string {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(elem...))
	testutil.Must(t, err)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// A layer can be deleted whatever an image puts into it.
func TestRemoveAwkward(t *testing.T) {
	root := t.TempDir()
	s, removed := openWatched(t, root)
	id := create(t, s, makeTar(t,
		dir("none", 0), file("none/x", ""), mode(file("f", ""), 0), dir(strings.Repeat("d/", 2000), 0), symlink("l", "/etc"), device(tar.TypeFifo, "p", 0, 0),
	))
	testutil.Must(t, s.Remove(id))
	await(t, removed, 1)
	expectEmpty(t, filepath.Join(root, "trash"))
}

// A deletion that fails is tried again with the next, and at the next Open.
func TestRemoveFails(t *testing.T) {
	root := t.TempDir()
	w := watched{NewDirectory(unpack.Layer), make(chan string, 100)}
	s, err := Open(root, w, Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	removed := w.removed
	busy := create(t, s, makeTar(t, dir("mount", 0o755)))
	mountpoint := filepath.Join(s.layerDir(busy), treeDir, "mount")
	testutil.Must(t, unix.Mount("tmpfs", mountpoint, "tmpfs", 0, ""))
	other := create(t, s, makeTar(t, file("b", "1")))
	testutil.Must(t, s.Remove(busy))
	first := await(t, removed, 1)
	testutil.Must(t, s.Remove(other))
	for await(t, removed, 1) == first { // it may be tried any number of times before the other's turn
	}
	testutil.Must(t, s.Close())
	testutil.Must(t, unix.Unmount(filepath.Join(first, treeDir, "mount"), 0))
	again, removedAgain := openWatched(t, root)
	await(t, removedAgain, 1)
	expectEmpty(t, filepath.Join(root, "trash"))
	if len(again.List()) != 0 {
		t.Errorf("layers %v", again.List())
	}
}

func TestReopen(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	bottom := create(t, s, makeTar(t, dir(".", 0o711), file("a", "1")))
	top := create(t, s, makeTar(t, hardlink("\xff", "a"), file("d/x", "2"), file(".wh.y", "")))
	want, err := s.Stack(context.Background(), []digest.Digest{bottom, top})
	testutil.Must(t, err)
	infos := []Info{*s.layers.Get(bottom), *s.layers.Get(top)}
	usage := s.Usage()
	testutil.Must(t, s.Close())

	s, err = Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	defer s.Close()
	for _, info := range infos {
		if got, err := s.Info(info.Name); err != nil || got != info {
			t.Errorf("%+v, %v; want %+v", got, err, info)
		}
	}
	if s.Usage() != usage {
		t.Errorf("usage %+v, want %+v", s.Usage(), usage)
	}
	if got, err := s.Stack(context.Background(), []digest.Digest{bottom, top}); err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("stack %v, %v; want %v", got, err, want)
	}
	if len(want) != 3 {
		t.Errorf("stack %v has no join", want)
	}
}

// Open sets unusable layers aside at once. They are deleted later, when no container of an earlier
// daemon can run on them.
func TestOpenSetsAside(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	keep := create(t, s, makeTar(t, file("keep", "1")))
	torn := create(t, s, makeTar(t, file("torn", "1")))
	rotten := create(t, s, makeTar(t, file("rotten", "1")))
	alien := create(t, s, makeTar(t, file("alien", "1")))
	moved := create(t, s, makeTar(t, file("moved", "1")))
	bare := create(t, s, makeTar(t, file("bare", "1")))
	top := create(t, s, makeTar(t, hardlink("b", "torn")))
	chain := []digest.Digest{torn, top}
	mounted, err := s.Stack(context.Background(), chain)
	testutil.Must(t, err)
	testutil.Must(t, s.Close())
	testutil.Must(t, os.Truncate(filepath.Join(s.layerDir(torn), recordFile), 20))
	change(t, s.layerDir(rotten), `"tarBytes":2048`, `"tarBytes":2049`) // only the checksum can tell
	testutil.Must(t, writeRecord(s.layerDir(alien), layerKind, Info{Name: alien, Kind: "erofs"}))
	testutil.Must(t, os.Rename(s.layerDir(moved), s.layerDir(digest.FromString("other"))))
	testutil.Must(t, os.Remove(filepath.Join(s.layerDir(bare), recordFile)))
	testutil.Must(t, os.MkdirAll(filepath.Join(root, "tmp/half/fs/deep"), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(root, "layers/file"), nil, 0o600))
	testutil.Must(t, os.MkdirAll(filepath.Join(root, "trash/old/fs"), 0o700))

	s, removed := openWatched(t, root)
	await(t, removed, 2) // half, old
	want := []digest.Digest{keep, top}
	slices.Sort(want)
	if !slices.Equal(s.List(), want) || len(entries(t, root, "layers")) != 3 {
		t.Errorf("layers %v, want %v and what is set aside", s.List(), want)
	}
	if n := len(entries(t, root, "layers", "set-aside")); n != 6 { // torn, rotten, alien, moved, bare, file
		t.Errorf("%d layers are set aside", n)
	}
	if n := len(entries(t, root, "joins", "set-aside")); n != 1 {
		t.Errorf("%d joins are set aside", n)
	}
	if _, err := s.Stack(context.Background(), chain); errdefs.Code(err) != codes.NotFound {
		t.Errorf("stack of a layer that is set aside: %v", err)
	}

	testutil.Must(t, s.DropSetAside([][]digest.Digest{chain}))
	await(t, removed, 5)
	for i, kept := range []string{"layers/set-aside/" + torn.Encoded() + ".0", "layers/" + top.Encoded(), "joins/set-aside/" + filepath.Base(filepath.Dir(mounted[2].Path)) + ".0"} {
		if _, err := os.Stat(filepath.Join(root, kept, treeDir)); err != nil {
			t.Errorf("part %d of what a container runs on: %v", i, err)
		}
	}
	survey, err := Inspect(root)
	testutil.Must(t, err)
	if len(survey.SetAside) != 2 || len(survey.Damaged) != 0 || len(survey.Layers) != 2 {
		t.Errorf("found %+v", survey)
	}
	create(t, s, makeTar(t, file("torn", "1"))) // pulled again
	testutil.Must(t, s.DropSetAside(nil))
	await(t, removed, 2)
	testutil.Must(t, s.DropSetAside(nil))
	expectEmpty(t, filepath.Join(root, "trash"), filepath.Join(root, "tmp"), filepath.Join(root, "joins"))
	if n := len(entries(t, root, "layers")); n != 3 || !s.Has(torn) {
		t.Errorf("%d entries", n)
	}
}

// change replaces text in the record of a layer.
func change(t *testing.T, dir, old, new string) {
	t.Helper()
	path := filepath.Join(dir, recordFile)
	data, err := os.ReadFile(path)
	testutil.Must(t, err)
	if !bytes.Contains(data, []byte(old)) {
		t.Fatalf("%q is not in %s", old, data)
	}
	testutil.Must(t, os.WriteFile(path, bytes.Replace(data, []byte(old), []byte(new), 1), 0o600))
}

// If a record cannot be read and may be good, Open fails and removes nothing.
func TestOpenKeepsUnreadableRecords(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	id := create(t, s, makeTar(t, file("a", "1")))
	testutil.Must(t, s.Close())
	path := filepath.Join(s.layerDir(id), recordFile)
	good, err := os.ReadFile(path)
	testutil.Must(t, err)

	newer, err := record.Encode(layerKind, recordVersion+1, struct{}{})
	testutil.Must(t, err)
	testutil.Must(t, os.WriteFile(path, newer, 0o600))
	if _, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog()); err == nil || !strings.Contains(err.Error(), "written by a newer berth") {
		t.Errorf("the record of a newer berth: %v", err)
	}
	testutil.Must(t, os.WriteFile(path, good, 0o600))
	var limit unix.Rlimit
	testutil.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}))
	_, err = Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("without descriptors: %v", err)
	}
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{&os.PathError{Err: unix.ENFILE}, true}, {&os.PathError{Err: unix.ENOMEM}, true}, {&os.PathError{Err: unix.EACCES}, true},
		{&os.PathError{Err: unix.ENOENT}, false}, {&os.PathError{Err: unix.EIO}, false}, {&os.PathError{Err: unix.EUCLEAN}, false},
		{fmt.Errorf("x: %w", record.ErrCorrupt), false}, {fmt.Errorf("x: %w", errNewer), true},
	} {
		if mayBeGood(tt.err) != tt.want {
			t.Errorf("%v: a record that may be good: %v", tt.err, !tt.want)
		}
	}
	s = openStore(t, root)
	if !s.Has(id) {
		t.Error("the layer is gone")
	}
}

// Records of up to 0.2.0 are the JSON alone.
func TestOldRecords(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	low := create(t, s, makeTar(t, file("a", "1")))
	top := create(t, s, makeTar(t, hardlink("b", "a")))
	want, err := s.Stack(context.Background(), []digest.Digest{low, top})
	testutil.Must(t, err)
	testutil.Must(t, s.Close())
	for _, dir := range []string{s.layerDir(low), s.layerDir(top), filepath.Dir(want[2].Path)} {
		data, err := os.ReadFile(filepath.Join(dir, recordFile))
		testutil.Must(t, err)
		_, body, _ := bytes.Cut(data, []byte("\n"))
		testutil.Must(t, os.WriteFile(filepath.Join(dir, recordFile), body, 0o600))
	}
	s = openStore(t, root)
	if got, err := s.Stack(context.Background(), []digest.Digest{low, top}); err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}

// Layers on a read-only disk can be used.
func TestOpenReadOnly(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	good, torn := create(t, s, makeTar(t, file("a", "1"))), create(t, s, makeTar(t, file("torn", "1")))
	testutil.Must(t, s.Close())
	testutil.Must(t, os.Truncate(filepath.Join(s.layerDir(torn), recordFile), 20))
	half := filepath.Join(root, "tmp", "half")
	testutil.Must(t, os.MkdirAll(filepath.Join(half, "fs"), 0o700))
	testutil.Must(t, os.MkdirAll(filepath.Join(root, "trash", "old"), 0o700))
	testutil.Must(t, unix.Mount(root, root, "", unix.MS_BIND, ""))
	defer func() { testutil.Must(t, unix.Unmount(root, unix.MNT_DETACH)) }()
	testutil.Must(t, unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	s, err = Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	if !slices.Equal(s.List(), []digest.Digest{good}) {
		t.Errorf("layers %v", s.List())
	}
	testutil.Must(t, s.DropSetAside(nil))
	testutil.Must(t, unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_BIND, ""))
	create(t, s, makeTar(t, file("torn", "1"))) // it replaces the damaged one
	testutil.Must(t, s.DropSetAside(nil))
	testutil.Must(t, s.Close())

	s, removed := openWatched(t, root)
	for range removed {
		if len(entries(t, root, "tmp"))+len(entries(t, root, "trash")) == 0 {
			break
		}
	}
	if len(s.List()) != 2 || len(entries(t, root, "layers")) != 2 {
		t.Errorf("layers %v", s.List())
	}
}

func TestConcurrent(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	var tars [][]byte
	var chain []digest.Digest
	for i := range 8 {
		list := []header{file(fmt.Sprintf("dir/%d", i), fmt.Sprint(i))}
		if i == 0 {
			list = append(list, dir("dir", 0o710))
		} else {
			list = append(list, hardlink(fmt.Sprintf("dir/link%d", i), fmt.Sprintf("dir/%d", i-1)))
		}
		for j := range 50 {
			list = append(list, file(fmt.Sprintf("d%d/%d", i, j), strings.Repeat("x", j*100)))
		}
		tars = append(tars, makeTar(t, list...))
		chain = append(chain, digest.FromBytes(tars[i]))
	}
	var wg sync.WaitGroup
	for i := range tars {
		for range 3 { // makers of the same layer
			wg.Go(func() {
				if err := s.Create(context.Background(), Source{DiffID: chain[i]}, bytes.NewReader(tars[i]), unpack.Limits{}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Go(func() { s.Usage(); s.List(); s.Has(chain[i]) })
	}
	wg.Wait()
	for range 4 {
		wg.Go(func() {
			if _, err := s.Stack(context.Background(), chain); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	top := mounted(t, s, chain...)
	for i := 1; i < len(chain); i++ {
		if got := describe(t, fmt.Sprintf("%s/dir/link%d", top, i)); got != fmt.Sprintf("f 644 0:0 %q", fmt.Sprint(i-1)) {
			t.Errorf("link %d is %s", i, got)
		}
	}
	if got := describe(t, top+"/dir"); got != "d 710 0:0" {
		t.Errorf("dir is %s", got)
	}
	expectEmpty(t, filepath.Join(root, "tmp"))
}

// Two callers create the same layer. One whose tar stalls does not delay the other and finds the
// layer there in the end. One that fails leaves the layer to the other.
func TestConcurrentCreationKeepsFirst(t *testing.T) {
	for name, end := range map[string]error{"slow": nil, "failing": errors.New("connection reset")} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			s := openStore(t, root)
			data := makeTar(t, file("a", "1"))
			id := digest.FromBytes(data)
			started, goOn := make(chan struct{}), make(chan struct{})
			wait := readerFunc(func([]byte) (int, error) { close(started); <-goOn; return 0, io.EOF })
			tar := io.MultiReader(wait, bytes.NewReader(data))
			if end != nil {
				tar = io.MultiReader(wait, iotest.ErrReader(end))
			}
			first := make(chan error, 1)
			go func() { first <- s.Create(context.Background(), Source{DiffID: id}, tar, unpack.Limits{}) }()
			<-started
			testutil.Must(t, s.Remove(id)) // not there yet: does not wait
			testutil.Must(t, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
			close(goOn)
			if err := <-first; !errors.Is(err, end) || !s.Has(id) {
				t.Errorf("the first: %v, want %v; there: %v", err, end, s.Has(id))
			}
			if got := entries(t, root, "layers"); len(got) != 1 {
				t.Errorf("layers on disk: %v", got)
			}
			expectEmpty(t, filepath.Join(root, "tmp"))
		})
	}
}

func TestRemoveAndCreateRace(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	data := makeTar(t, file("a", "1"), hardlink("b", "a"))
	id := digest.FromBytes(data)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				if err := s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 20 {
				if err := s.Remove(id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := len(entries(t, root, "layers")); got > 1 || (got == 1) != s.Has(id) {
		t.Errorf("%d layers on disk, there: %v", got, s.Has(id))
	}
}

func TestStackErrors(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	bottom := create(t, s, makeTar(t, dir("d", 0o755), file("f", "1")))
	top := create(t, s, makeTar(t, file("x", "1")))
	var many []digest.Digest
	for range 501 {
		many = append(many, bottom)
	}
	nowhere := create(t, s, makeTar(t, file("y", ""), hardlink("link", "no/where")))
	toDir := create(t, s, makeTar(t, hardlink("link", "d")))
	through := create(t, s, makeTar(t, hardlink("link", "f/x")))
	loop := create(t, s, makeTar(t, symlink("a", "b"), symlink("b", "a")))
	inLoop := create(t, s, makeTar(t, hardlink("link", "a/x")))
	cases := []struct {
		name  string
		chain []digest.Digest
		code  codes.Code
		text  string
	}{
		{"no layers", nil, codes.InvalidArgument, "no layers"},
		{"missing", []digest.Digest{bottom, digest.FromString("none")}, codes.NotFound, digest.FromString("none").String()},
		{"too many", many, codes.InvalidArgument, "501 layers"},
		{"link to nowhere", []digest.Digest{bottom, nowhere}, codes.InvalidArgument, `"link" to "no/where"`},
		{"link to nowhere in the lowest", []digest.Digest{nowhere, top}, codes.InvalidArgument, nowhere.String()},
		{"link to a directory", []digest.Digest{bottom, toDir}, codes.InvalidArgument, "directory"},
		{"link through a file", []digest.Digest{bottom, through}, codes.InvalidArgument, "no such file"},
		{"link through a loop", []digest.Digest{loop, inLoop}, codes.InvalidArgument, "too many levels"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for range 2 { // a failure is not remembered as a success
				if _, err := s.Stack(context.Background(), c.chain); errdefs.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
					t.Errorf("%v: %v; want %v with %q", errdefs.Code(err), err, c.code, c.text)
				}
			}
			expectEmpty(t, filepath.Join(root, "joins"), filepath.Join(root, "tmp"))
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Stack(ctx, []digest.Digest{bottom, top}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// A chain that needs no join has none, and a layer alone is mounted as it is.
func TestStackWithoutJoin(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	a := create(t, s, makeTar(t, dir("d", 0o755), file("d/a", "1")))
	b := create(t, s, makeTar(t, file("d/b", "1")))
	hiding := create(t, s, makeTar(t, file("c", "1"), file(".wh.x", "")))
	for _, c := range []struct {
		chain []digest.Digest
		want  []string
	}{
		{[]digest.Digest{a}, []string{s.layerDir(a)}},
		{[]digest.Digest{a, b}, []string{s.layerDir(a), s.layerDir(b)}},
		{[]digest.Digest{a, a}, []string{s.layerDir(a), s.layerDir(a)}},
		{[]digest.Digest{hiding}, []string{s.emptyDir(), s.layerDir(hiding)}},
	} {
		layers, err := s.Stack(context.Background(), c.chain)
		testutil.Must(t, err)
		var got []string
		for _, l := range layers {
			got = append(got, filepath.Dir(l.Path))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("stack of %v: %v, want %v", c.chain, got, c.want)
		}
	}
	expectEmpty(t, filepath.Join(root, "joins"))
}

// killed is set in the environment of a process that makes a layer of its standard
// input and is killed meanwhile.
const killed = "BERTH_LAYER_KILLED"

func TestMaker(t *testing.T) {
	root := os.Getenv(killed)
	if root == "" {
		t.Skip("run by TestKill")
	}
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	fmt.Println("ready")
	id := digest.Digest(os.Args[len(os.Args)-1])
	testutil.Must(t, s.Create(context.Background(), Source{DiffID: id}, os.Stdin, unpack.Limits{}))
	fmt.Println("done")
}

// Whenever the process dies, the layer is there as a whole or not at all.
func TestKill(t *testing.T) {
	var list []header
	for i := range 200 {
		list = append(list, file(fmt.Sprintf("d%d/f%d", i%7, i), strings.Repeat("x", i*50)))
	}
	data := makeTar(t, list...)
	id := digest.FromBytes(data)
	for _, n := range []int{0, 1000, len(data) / 2, len(data) - 1, len(data)} {
		for _, eof := range []bool{false, true} {
			if eof && n < len(data) {
				continue
			}
			t.Run(fmt.Sprintf("%d %v", n, eof), func(t *testing.T) {
				root := t.TempDir()
				killMaker(t, root, id, data[:n], eof)
				s, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
				testutil.Must(t, err)
				defer s.Close()
				if s.Has(id) && !eof {
					t.Error("a layer is there whose tar had not ended")
				}
				if s.Has(id) {
					checkTree(t, filepath.Join(s.layerDir(id), treeDir), s.layers.Get(id).Usage)
				} else if names := entries(t, root, "layers"); len(names) > 0 {
					t.Errorf("layers: %v", names)
				}
				expectEmpty(t, filepath.Join(root, "tmp"))
				create(t, s, data)
			})
		}
	}
}

// killMaker starts a process that creates the layer, and kills it after it got data. If that is all
// data (eof), it kills at a random moment, otherwise while the process waits for more.
func killMaker(t testing.TB, root string, id digest.Digest, data []byte, eof bool) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestMaker$", "--", id.String())
	cmd.Env = append(os.Environ(), killed+"="+root)
	in, err := cmd.StdinPipe()
	testutil.Must(t, err)
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	line := make([]byte, len("ready\n"))
	_, err = io.ReadFull(out, line)
	testutil.Must(t, err)
	_, err = in.Write(data)
	testutil.Must(t, err)
	if eof {
		testutil.Must(t, in.Close())
	}
	testutil.Must(t, cmd.Process.Kill())
	cmd.Wait() // "signal: killed", or success if it was faster
}

// Layers of two blobs are distinct, even if both blobs claim the same tar.
func TestLayersOfTwoBlobs(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	data := makeTar(t, file("f", "content"))
	tar := digest.FromBytes(data)
	first, second := Source{digest.FromString("one blob"), tar}, Source{digest.FromString("another"), tar}
	testutil.Must(t, s.Create(context.Background(), first, bytes.NewReader(data), unpack.Limits{}))
	if s.Has(second.Name()) || s.Has(tar) {
		t.Error("the layer is there for another blob")
	}
	testutil.Must(t, s.Create(context.Background(), second, bytes.NewReader(data), unpack.Limits{}))
	for _, from := range []Source{first, second} {
		info, err := s.Info(from.Name())
		if err != nil || info.Source != from || info.Name != from.Name() {
			t.Errorf("%+v: %+v, %v", from, info, err)
		}
	}
	found, err := Inspect(root)
	if err != nil || len(found.Layers) != 2 || len(found.Damaged) > 0 {
		t.Errorf("%+v, %v", found, err)
	}
	// A record whose blob does not match the layer's name is invalid.
	testutil.Must(t, writeRecord(s.layerDir(second.Name()), layerKind, Info{Name: second.Name(), Source: first, Kind: rootfs.Directory}))
	if found, err = Inspect(root); err != nil || len(found.Layers) != 1 || len(found.Damaged) != 1 {
		t.Errorf("%+v, %v", found, err)
	}
	for _, bad := range []Source{{"x", tar}, {tar, "x"}, {tar, ""}} {
		if err := s.Create(context.Background(), bad, nil, unpack.Limits{}); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
