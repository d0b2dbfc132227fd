package layer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/erofs"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// openImages opens a store of the EROFS driver, which the kernel must be able to mount.
func openImages(t testing.TB, root string, reserve Reserve) *Store {
	t.Helper()
	if err := erofs.Probe(filepath.Dir(root)); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	} else {
		testutil.Must(t, err)
	}
	s, err := Open(root, NewEROFS(unpack.Pack, 0), reserve, nil, discardLog())
	testutil.Must(t, err)
	return s
}

// shown reads a file of a chain of layers.
func shown(t testing.TB, s *Store, name string, chain ...digest.Digest) string {
	t.Helper()
	layers, err := s.Stack(context.Background(), chain)
	testutil.Must(t, err)
	mount, err := rootfs.Spec{Layers: layers}.Mount()
	testutil.Must(t, err)
	defer mount.Close()
	data, err := safefs.ReadFile(mount, name, 1<<20)
	testutil.Must(t, err)
	return string(data)
}

// A damaged image of merged layers is recreated before the next mount.
func TestDamagedMergedImageIsRecreated(t *testing.T) {
	root := filepath.Join(testutil.DiskDir(t), "store")
	damage := map[string]func(image string) error{
		"gone":      os.Remove,
		"empty":     func(image string) error { return os.Truncate(image, 0) },
		"zeros":     func(image string) error { return errors.Join(os.Truncate(image, 0), os.Truncate(image, 64<<10)) },
		"bad magic": func(image string) error { return overwrite(image, 1024, "x") },
		"bad sum":   func(image string) error { return overwrite(image, 1028, "xxxx") },
		"bad root":  func(image string) error { return overwrite(image, 4096, strings.Repeat("\xff", 64)) },
	}
	s := openImages(t, root, Reserve{})
	chain := []digest.Digest{create(t, s, makeTar(t, file("f", "1"))), create(t, s, makeTar(t, file("g", "2")))}
	if got := shown(t, s, "g", chain...); got != "2" {
		t.Fatal(got)
	}
	for name, spoil := range damage {
		testutil.Must(t, s.Close())
		image, err := filepath.Glob(filepath.Join(root, "joins", "*", imageFile))
		if testutil.Must(t, err); len(image) != 1 {
			t.Fatalf("%s: the images of layers are %q", name, image)
		}
		testutil.Must(t, spoil(image[0]))
		s = openImages(t, root, Reserve{})
		if got := shown(t, s, "f", chain...); got != "1" {
			t.Errorf("%s: %q", name, got)
		}
		testutil.Must(t, s.DropSetAside(nil))
	}
	for _, id := range chain {
		testutil.Must(t, s.Remove(id))
	}
	if left := entries(t, root, "joins"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	testutil.Must(t, s.Close())
}

func overwrite(path string, at int64, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(text), at)
	return errors.Join(err, f.Close())
}

// An error about a lack of resources does not count as damage: nothing is recreated or set aside.
func TestLackOfResourcesIsNoDamage(t *testing.T) {
	root := filepath.Join(testutil.DiskDir(t), "store")
	s := openImages(t, root, Reserve{})
	id := create(t, s, makeTar(t, file("f", "1")))
	shown(t, s, "f", id)
	testutil.Must(t, s.Close())
	s = openImages(t, root, Reserve{})
	defer func() { testutil.Must(t, s.Close()) }()
	var before unix.Rlimit
	testutil.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: before.Max}))
	_, err := s.Stack(context.Background(), []digest.Digest{id})
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("without descriptors: %v", err)
	}
	if left := entries(t, root, "joins"); len(left) != 1 || left[0] == "set-aside" {
		t.Errorf("joins: %q", left)
	}
	if got := shown(t, s, "f", id); got != "1" {
		t.Error(got)
	}
}

// A merged image is not written if it would take from the disk's reserve. An existing one is still
// mounted.
func TestMergeLeavesReserve(t *testing.T) {
	root := filepath.Join(testutil.DiskDir(t), "store")
	s := openImages(t, root, Reserve{Percent: 5, Bytes: 1 << 30})
	defer func() { testutil.Must(t, s.Close()) }()
	free := uint64(1 << 20)
	s.statfs = func() (unix.Statfs_t, error) {
		return unix.Statfs_t{Bsize: 4096, Blocks: 1 << 20, Files: 1 << 20, Ffree: 1 << 20, Bavail: free}, nil
	}
	a, b := create(t, s, makeTar(t, file("f", "1"))), create(t, s, makeTar(t, file("g", "2")))
	shown(t, s, "f", a)
	free = 0
	if _, err := s.Stack(context.Background(), []digest.Digest{a, b}); errdefs.Code(err) != codes.ResourceExhausted || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("without room: %v", err)
	}
	if got := shown(t, s, "f", a); got != "1" {
		t.Error(got)
	}
	free = 1 << 20
	if got := shown(t, s, "g", a, b); got != "2" {
		t.Error(got)
	}
}

// Waiting for a merged image ends with the waiter's context.
func TestMergeEndsWithItsContext(t *testing.T) {
	s := openImages(t, filepath.Join(testutil.DiskDir(t), "store"), Reserve{})
	defer func() { testutil.Must(t, s.Close()) }()
	id := create(t, s, makeTar(t, file("f", "1")))
	ctx, cancel := context.WithTimeout(context.Background(), time.Nanosecond)
	defer cancel()
	<-ctx.Done()
	if _, err := s.Stack(ctx, []digest.Digest{id}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if left := entries(t, s.root, "joins"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
