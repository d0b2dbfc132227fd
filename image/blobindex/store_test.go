package blobindex

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/internal/testutil"
)

// layerFiles are the files of a layer.
type layerFiles struct{ tree, record string }

// storedSample returns an index of a plain blob, and the files of its layer.
func storedSample(t *testing.T, name string) (*Index, layerFiles) {
	t.Helper()
	dir := t.TempDir()
	files := layerFiles{filepath.Join(dir, "tree"), filepath.Join(dir, "tar")}
	tree, record := []byte("tree of "+name), []byte("record of "+name)
	testutil.Must(t, os.WriteFile(files.tree, tree, 0o600))
	testutil.Must(t, os.WriteFile(files.record, record, 0o600))
	blob := []byte(name)
	return &Index{
		Blob: digest.FromBytes(blob), BlobSize: int64(len(blob)), DiffID: digest.FromBytes(blob), TarSize: int64(len(blob)),
		Points:     []Point{{Start: true}},
		TreeDigest: digest.FromBytes(tree), RecordDigest: digest.FromBytes(record), DataSize: 4096,
	}, files
}

func openStore(t *testing.T, dir string, maxBytes int64) *Store {
	t.Helper()
	s, err := Open(dir, maxBytes, slog.New(slog.DiscardHandler))
	testutil.Must(t, err)
	return s
}

func add(t *testing.T, s *Store, name string) digest.Digest {
	t.Helper()
	x, files := storedSample(t, name)
	testutil.Must(t, s.Add(x, files.tree, files.record))
	return x.Blob
}

// wantEntries checks the directory, and that Usage counts the same.
func wantEntries(t *testing.T, s *Store, blobs ...digest.Digest) {
	t.Helper()
	found, err := os.ReadDir(s.dir)
	testutil.Must(t, err)
	sum := int64(0)
	for _, f := range found {
		e, err := stat(filepath.Join(s.dir, f.Name()))
		testutil.Must(t, err)
		sum += e.size
	}
	n, bytes := s.Usage()
	if len(found) != len(blobs) || n != len(blobs) || bytes != sum {
		t.Errorf("%d entries, %d indexes with %d bytes; want %d with %d", len(found), n, bytes, len(blobs), sum)
	}
	for _, blob := range blobs {
		if !s.Has(blob) {
			t.Errorf("no index of %s", blob)
		}
	}
}

func TestIndexOutlivesItsLayer(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 1<<20)
	x, files := storedSample(t, "a")
	testutil.Must(t, s.Add(x, files.tree, files.record))
	testutil.Must(t, s.Add(x, "none", "none")) // there is one
	testutil.Must(t, os.RemoveAll(filepath.Dir(files.tree)))
	for range 2 {
		got, err := s.Get(x.Blob)
		testutil.Must(t, err)
		if got.Blob != x.Blob || string(got.Tree) != "tree of a" || string(got.Record) != "record of a" {
			t.Errorf("%+v", got)
		}
		wantEntries(t, s, x.Blob)
		s = openStore(t, dir, 1<<20)
	}
	testutil.Must(t, s.Remove(x.Blob))
	testutil.Must(t, s.Remove(x.Blob))
	wantEntries(t, s)
	if _, err := s.Get(x.Blob); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func TestLeastRecentlyUsedIsRemoved(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 1<<20)
	a := add(t, s, "a")
	_, one := s.Usage()
	s.max = 3 * one
	b, c := add(t, s, "b"), add(t, s, "c")
	wantEntries(t, s, a, b, c)
	if _, err := s.Get(a); err != nil {
		t.Fatal(err)
	}
	d := add(t, s, "d")
	wantEntries(t, s, a, c, d)

	past := time.Now().Add(-time.Hour)
	testutil.Must(t, os.Chtimes(filepath.Join(dir, a.Encoded(), indexFile), past, past))
	s = openStore(t, dir, 2*one)
	wantEntries(t, s, c, d)
	s = openStore(t, dir, 0)
	wantEntries(t, s)
	add(t, s, "a")
	wantEntries(t, s)
}

func TestTooLargeIndexKeepsOthers(t *testing.T) {
	s := openStore(t, t.TempDir(), 1<<20)
	a := add(t, s, "a")
	_, s.max = s.Usage()
	x, files := storedSample(t, "b")
	testutil.Must(t, os.WriteFile(files.tree, make([]byte, s.max), 0o600))
	if err := s.Add(x, files.tree, files.record); !errors.Is(err, errTooLarge) {
		t.Error(err)
	}
	wantEntries(t, s, a)
}

func TestDamagedIndexIsRemoved(t *testing.T) {
	for _, name := range []string{indexFile, treeFile, recordFile} {
		for how, damage := range map[string]func(path string) error{
			"cut":     func(path string) error { return os.Truncate(path, 3) },
			"missing": os.Remove,
			"changed": func(path string) error { return os.WriteFile(path, []byte("other"), 0o600) },
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				dir := t.TempDir()
				s := openStore(t, dir, 1<<20)
				a, b := add(t, s, "a"), add(t, s, "b")
				testutil.Must(t, damage(filepath.Join(dir, a.Encoded(), name)))
				damaged, err := Inspect(dir)
				testutil.Must(t, err)
				if len(damaged) != 1 || damaged[filepath.Join(dir, a.Encoded())] == nil {
					t.Errorf("Inspect: %v", damaged)
				}
				if _, err := s.Get(a); !errors.Is(err, fs.ErrNotExist) {
					t.Error(err)
				}
				wantEntries(t, s, b)
			})
		}
	}
}

// TestIndexOfAnotherBlob checks that an index under a wrong name is not used.
func TestIndexOfAnotherBlob(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 1<<20)
	a, other := add(t, s, "a"), digest.FromString("other")
	testutil.Must(t, os.Rename(filepath.Join(dir, a.Encoded()), filepath.Join(dir, other.Encoded())))
	s = openStore(t, dir, 1<<20)
	if _, err := s.Get(other); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, ErrDamaged) {
		t.Error(err)
	}
	wantEntries(t, s)
}

func TestOpenRemovesTheRestOfACrash(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 1<<20)
	a := add(t, s, "a")
	testutil.Must(t, os.Mkdir(filepath.Join(dir, tmpPrefix+"1"), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, tmpPrefix+"2"), nil, 0o600))
	testutil.Must(t, os.Mkdir(filepath.Join(dir, digest.FromString("incomplete").Encoded()), 0o700))
	wantEntries(t, openStore(t, dir, 1<<20), a)
}

func TestClear(t *testing.T) {
	s := openStore(t, t.TempDir(), 1<<20)
	for i := range 3 {
		add(t, s, fmt.Sprint(i))
	}
	_, bytes := s.Usage()
	if freed, err := s.Clear(); err != nil || freed != bytes {
		t.Errorf("%d bytes of %d, %v", freed, bytes, err)
	}
	wantEntries(t, s)
}

func TestNewFileHasNoName(t *testing.T) {
	s := openStore(t, t.TempDir(), 1<<20)
	f, err := s.NewFile()
	testutil.Must(t, err)
	defer f.Close()
	wantEntries(t, s)
	if _, err := f.Write(bytes.Repeat([]byte("x"), 100)); err != nil {
		t.Error(err)
	}
}

// The registries of a blob outlive the store. A line that was not written whole does not count.
func TestServed(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, 1<<20)
	x, files := storedSample(t, "blob")
	testutil.Must(t, s.NoteServed(x.Blob, "a.example")) // no index yet
	testutil.Must(t, s.Add(x, files.tree, files.record))
	if s.Served(x.Blob, "a.example") {
		t.Error("served before there was an index")
	}
	for range 2 {
		testutil.Must(t, s.NoteServed(x.Blob, "a.example"))
	}
	path := filepath.Join(dir, x.Blob.Encoded(), registriesFile)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	testutil.Must(t, err)
	_, err = f.WriteString("b.example")
	testutil.Must(t, err)
	testutil.Must(t, f.Close())
	s = openStore(t, dir, 1<<20)
	if !s.Served(x.Blob, "a.example") || s.Served(x.Blob, "b.example") || len(s.entries[x.Blob].registries) != 1 {
		t.Errorf("registries %q", s.entries[x.Blob].registries)
	}
}

// A profile grows up to a limit. A damaged one is empty.
func TestProfile(t *testing.T) {
	s := openStore(t, t.TempDir(), 1<<20)
	x, files := storedSample(t, "blob")
	testutil.Must(t, s.AddProfile(x.Blob, []int{1})) // no index
	testutil.Must(t, s.Add(x, files.tree, files.record))
	for _, c := range []struct{ add, want []int }{{nil, nil}, {[]int{3, 1}, []int{3, 1}}, {[]int{1, 2}, []int{3, 1, 2}}} {
		testutil.Must(t, s.AddProfile(x.Blob, c.add))
		if got := s.Profile(x.Blob); !slices.Equal(got, c.want) {
			t.Errorf("%v added: %v, want %v", c.add, got, c.want)
		}
	}
	many := make([]int, 2*maxProfile)
	for i := range many {
		many[i] = i
	}
	testutil.Must(t, s.AddProfile(x.Blob, many))
	if got := s.Profile(x.Blob); len(got) != maxProfile || got[0] != 3 {
		t.Errorf("%d spans, the first is %d", len(got), got[0])
	}
	testutil.Must(t, os.WriteFile(filepath.Join(s.dir, x.Blob.Encoded(), profileFile), []byte("[1,"), 0o600))
	if got := s.Profile(x.Blob); len(got) > 0 {
		t.Errorf("damaged: %v", got)
	}
}
