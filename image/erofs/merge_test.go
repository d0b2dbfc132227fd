package erofs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/testutil"
)

func free(int) error { return nil }

// layerOf writes the files of a layer.
func layerOf(t testing.TB, root *tree.Node) Files {
	t.Helper()
	dir := t.TempDir()
	f := Files{Tree: filepath.Join(dir, "tree"), Data: filepath.Join(dir, "data")}
	var b bytes.Buffer
	testutil.Must(t, tree.Encode(&b, root))
	testutil.Must(t, os.WriteFile(f.Tree, b.Bytes(), 0o600))
	testutil.Must(t, os.WriteFile(f.Data, nil, 0o600))
	return f
}

// One limit bounds the sum of an image's trees, however it is divided among the layers.
func TestMergeIsBounded(t *testing.T) {
	m := NewMerger(0)
	half := layerOf(t, tree.NewDir())
	testutil.Must(t, os.Truncate(half.Tree, maxTreeBytes/2))
	if _, err := m.Merge(t.Context(), io.Discard, []Files{half, half, layerOf(t, tree.NewDir())}, free); !errors.Is(err, tree.ErrTooLarge) {
		t.Errorf("layers that are too large together: %v", err)
	}
	if _, err := m.Merge(t.Context(), io.Discard, []Files{half}, free); err == nil || errors.Is(err, tree.ErrTooLarge) {
		t.Errorf("zeros behind a tree: %v", err)
	}
	const most = 1 << 20
	many := tree.NewDir()
	for i := range 1500 {
		many.Children[fmt.Sprint(i)] = &tree.Node{Mode: unix.S_IFCHR}
	}
	names := layerOf(t, many)
	m = NewMerger(most)
	if _, err := m.Merge(t.Context(), io.Discard, []Files{names}, free); err != nil {
		t.Error(err)
	}
	if _, err := m.Merge(t.Context(), io.Discard, []Files{names, names}, free); !errors.Is(err, tree.ErrTooLarge) {
		t.Errorf("too much together: %v", err)
	}
}

// heapWriter measures the heap at the first write. At that time the merged tree and the plan of the
// image are in memory.
type heapWriter struct{ live uint64 }

func (w *heapWriter) Write(b []byte) (int, error) {
	if w.live == 0 {
		w.live = liveHeap()
	}
	return len(b), nil
}

func liveHeap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A merge takes no more memory than the budget counts, whatever its layers contain.
func TestMemoryOfMerges(t *testing.T) {
	const most = 4 << 20
	file := func(int) *tree.Node { return &tree.Node{Mode: unix.S_IFREG | 0o644} }
	dir := func(children map[string]*tree.Node) *tree.Node {
		return &tree.Node{Mode: unix.S_IFDIR | 0o755, Children: children}
	}
	for name, node := range map[string]func(i int) *tree.Node{
		"files":       file,
		"whiteouts":   func(int) *tree.Node { return &tree.Node{Mode: unix.S_IFCHR} },
		"directories": func(int) *tree.Node { return dir(map[string]*tree.Node{}) },
		"one in each": func(i int) *tree.Node { return dir(map[string]*tree.Node{"f": file(i)}) },
		"nine in each": func(i int) *tree.Node {
			d := dir(map[string]*tree.Node{})
			for n := range 9 {
				d.Children[fmt.Sprint(n)] = file(i)
			}
			return d
		},
		"in each other": func(int) *tree.Node {
			d := dir(map[string]*tree.Node{})
			for range 100 {
				d = dir(map[string]*tree.Node{"d": d})
			}
			return d
		},
		"symlinks": func(int) *tree.Node { return &tree.Node{Mode: unix.S_IFLNK | 0o777, Target: "t"} },
		"small attributes": func(int) *tree.Node {
			n := file(0)
			for i := range 1000 {
				n.Xattrs = append(n.Xattrs, tree.Xattr{Name: fmt.Sprintf("user.%03d", i)})
			}
			return n
		},
		"attributes that nothing fits": func(int) *tree.Node { // neither 257 of them nor strings of 33 bytes
			n := file(0)
			for i := range 257 {
				n.Xattrs = append(n.Xattrs, tree.Xattr{Name: fmt.Sprintf("user.%028d", i), Value: strings.Repeat("v", 33)})
			}
			return n
		},
		"long attributes": func(int) *tree.Node { // 40 KiB of memory each
			n := file(0)
			n.Xattrs = []tree.Xattr{{Name: "user.a", Value: strings.Repeat("v", 32<<10+1)}}
			return n
		},
		"long targets": func(int) *tree.Node { return &tree.Node{Mode: unix.S_IFLNK | 0o777, Target: strings.Repeat("t", 2049)} },
		"one attribute": func(int) *tree.Node {
			n := file(0)
			n.Xattrs = []tree.Xattr{{Name: "user.a", Value: "v"}}
			return n
		},
		"links": func(i int) *tree.Node {
			if i == 0 {
				return file(0)
			}
			return &tree.Node{Target: "0"}
		},
	} {
		layer := func(n int) Files {
			root := tree.NewDir()
			for i := range n {
				root.Children[fmt.Sprint(i)] = node(i)
			}
			return layerOf(t, root)
		}
		n := 1
		for fits := true; fits; n *= 2 { // so many that they just fit
			_, err := NewMerger(most).Merge(t.Context(), io.Discard, []Files{layer(2 * n)}, free)
			if fits = err == nil; !fits && !errors.Is(err, tree.ErrTooLarge) {
				t.Fatal(err)
			}
			if !fits {
				break
			}
		}
		files, w := layer(n), &heapWriter{}
		_, counted, _, err := files.read(t.Context(), 0, math.MaxInt64)
		testutil.Must(t, err)
		before := liveHeap()
		_, err = NewMerger(most).Merge(t.Context(), w, []Files{files}, free)
		testutil.Must(t, err)
		took := int64(w.live - before)
		t.Logf("%s: %d take %d, counted are %d (%.2f)", name, n, took, counted, float64(took)/float64(counted))
		const buffers = 384 << 10
		if took > counted+buffers {
			t.Errorf("%s: %d take %d bytes, counted are %d", name, n, took, counted)
		}
	}
}

// Merges that need too much memory together wait for each other, and no longer than they may.
func TestMergesWait(t *testing.T) {
	l := layerOf(t, tree.NewDir())
	synctest.Test(t, func(t *testing.T) {
		m := NewMerger(0)
		testutil.Must(t, m.memory.Acquire(t.Context(), MaxMemory)) // another merge is at work
		reason := errors.New("enough")
		patient, ended := t.Context(), make(chan error, 1)
		impatient, cancel := context.WithCancelCause(patient)
		merge := func(ctx context.Context) {
			_, err := m.Merge(ctx, io.Discard, []Files{l}, free)
			ended <- err
		}
		go merge(impatient)
		synctest.Wait()
		cancel(reason)
		if err := <-ended; !errors.Is(err, reason) {
			t.Errorf("given up: %v", err)
		}
		go merge(patient)
		synctest.Wait()
		if len(ended) > 0 {
			t.Errorf("did not wait: %v", <-ended)
		}
		m.memory.Release(MaxMemory)
		testutil.Must(t, <-ended)
	})
}

// A merge ends with its context at any step.
func TestMergeIsCancelled(t *testing.T) {
	reason := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	below, links := tree.NewDir(), tree.NewDir()
	below.Children["f"] = &tree.Node{Mode: unix.S_IFREG}
	links.Children["l"] = &tree.Node{Target: "f"}
	_, err := NewMerger(0).Merge(ctx, io.Discard, []Files{layerOf(t, below), layerOf(t, links), layerOf(t, below)}, func(int) error {
		cancel(reason)
		return nil
	})
	if !errors.Is(err, reason) {
		t.Errorf("while trees are read: %v", err)
	}
	ctx, cancel = context.WithCancelCause(t.Context())
	_, err = NewMerger(0).Merge(ctx, io.Discard, []Files{layerOf(t, below), layerOf(t, links)}, func(int) error {
		cancel(reason)
		return nil
	})
	if !errors.Is(err, reason) {
		t.Errorf("while the image is written: %v", err)
	}
}

// The probe distinguishes a filesystem without support from a lack of resources, and leaves
// nothing.
func TestProbe(t *testing.T) {
	if err := Probe(filepath.Join(t.TempDir(), "missing")); err == nil || errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a directory that is not there: %v", err)
	}
	dir := testutil.DiskDir(t)
	if err := Probe(dir); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	} else {
		testutil.Must(t, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	small := t.TempDir()
	testutil.Must(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m"))
	defer func() { testutil.Must(t, unix.Unmount(small, 0)) }()
	if err := Probe(small); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a tmpfs: %v", err)
	}
	testutil.Must(t, os.WriteFile(filepath.Join(small, "full"), make([]byte, 1<<20), 0o600))
	if err := Probe(small); !errors.Is(err, unix.ENOSPC) || errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a full disk: %v", err)
	}
	var before unix.Rlimit
	testutil.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	lacking := 0
	for files := range uint64(64) {
		testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: before.Max}))
		err := Probe(dir)
		testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
		if errors.Is(err, unix.EMFILE) && !errors.Is(err, errors.ErrUnsupported) {
			lacking++
		} else if err != nil {
			t.Errorf("with %d descriptors: %v", files, err)
		}
	}
	if lacking == 0 {
		t.Error("no descriptor was lacking")
	}
}
