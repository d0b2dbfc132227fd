package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/erofs"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// Results of a probe.
var (
	works   = func(string) error { return nil }
	cannot  = func(string) error { return fmt.Errorf("%w: an old kernel", errors.ErrUnsupported) }
	noRoom  = func(string) error { return unix.ENOSPC }
	noFiles = func(string) error { return fmt.Errorf("mount: %w", unix.EMFILE) }
)

// driversConfig is of a store that may have layers of both kinds.
func driversConfig(t *testing.T) pull.Config {
	t.Helper()
	testutil.NeedRoot(t)
	root := testutil.DiskDir(t)
	if err := erofs.Probe(root); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	} else if err != nil {
		t.Fatal(err)
	}
	return pull.Config{Root: root, Pack: unpack.Pack}
}

// with is the configuration of another start.
func with(cfg pull.Config, driver string, probe func(string) error) pull.Config {
	cfg.Driver, cfg.Probe = driver, probe
	return cfg
}

// restart closes the store, if there is one, and opens it again.
func restart(t *testing.T, s *node, cfg pull.Config) *node {
	t.Helper()
	if s != nil {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return openStore(t, cfg)
}

// content mounts an image, reads one of its files and returns the kind of its layers.
func content(t *testing.T, s *node, ref, name string) (text string, kind rootfs.Kind) {
	t.Helper()
	img, err := s.Get(ref)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := s.Hold("content", img.Layers)
	if err != nil {
		t.Fatal(err)
	}
	mount, err := spec.Mount()
	if err != nil {
		t.Fatal(err)
	}
	defer mount.Close()
	data, err := safefs.ReadFile(mount, name, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Release("content"); err != nil {
		t.Fatal(err)
	}
	return string(data), spec.Layers[0].Kind
}

func wantContent(t *testing.T, s *node, ref, name, text string, kind rootfs.Kind) {
	t.Helper()
	if got, of := content(t, s, ref, name); got != text || of != kind {
		t.Errorf("%s of %s is %q, of %s; want %q, of %s", name, ref, got, of, text, kind)
	}
}

func TestImagesStayUsableWhenDriverChanges(t *testing.T) {
	cfg := driversConfig(t)
	reg := registrytest.New(t)
	reg.PutImage("old", "v1", "old", plain(t, "f", "old"), plain(t, "g", "2"))
	reg.PutImage("new", "v1", "new", plain(t, "f", "new"), plain(t, "h", "3"))
	reg.PutImage("late", "v1", "late", plain(t, "f", "late"), plain(t, "i", "4"))
	old, fresh, late := reg.Host()+"/old:v1", reg.Host()+"/new:v1", reg.Host()+"/late:v1"

	s := restart(t, nil, with(cfg, "erofs", nil))
	mustPull(t, s, old)
	wantContent(t, s, old, "f", "old", rootfs.EROFS)
	for _, probe := range []func(string) error{works, noRoom, noFiles} {
		s = restart(t, s, with(cfg, "directory", probe))
		wantContent(t, s, old, "f", "old", rootfs.EROFS)
	}
	mustPull(t, s, fresh)
	wantContent(t, s, fresh, "f", "new", rootfs.Directory)

	s = restart(t, s, with(cfg, "auto", noFiles)) // not known: nothing is lost, and nothing is begun
	if got := s.Driver(); got != rootfs.Directory {
		t.Errorf("layers are made as %s where nobody knows whether EROFS can be mounted", got)
	}
	wantContent(t, s, old, "f", "old", rootfs.EROFS)
	mustPull(t, s, late)
	wantContent(t, s, late, "f", "late", rootfs.Directory)

	s = restart(t, s, with(cfg, "erofs", noRoom)) // it was configured, and may work
	if got := s.Driver(); got != rootfs.EROFS {
		t.Errorf("layers are made as %s", got)
	}
	s = restart(t, s, with(cfg, "auto", works))
	for ref, text := range map[string]string{fresh: "new", late: "late"} {
		wantContent(t, s, ref, "f", text, rootfs.Directory)
	}
	wantContent(t, s, old, "f", "old", rootfs.EROFS)

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := open(t.Context(), with(cfg, "erofs", cannot), slog.New(slog.DiscardHandler))
	wantCode(t, err, codes.FailedPrecondition, "an old kernel")
	s = restart(t, nil, with(cfg, "auto", works)) // the failed start removed nothing
	wantContent(t, s, old, "f", "old", rootfs.EROFS)
}

func mustGet(t *testing.T, s *node, ref string) *image.Image {
	t.Helper()
	img, err := s.Get(ref)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// wantLayers checks how many layers there are in each form.
func wantLayers(t *testing.T, s *node, directory, erofs int) {
	t.Helper()
	if d, e := formsOf(s); d != directory || e != erofs {
		t.Errorf("%d layers are directories, %d EROFS; want %d and %d", d, e, directory, erofs)
	}
}

func formsOf(s *node) (directory, erofs int) {
	count := map[rootfs.Kind]int{}
	for _, f := range s.LayerForms() {
		count[f.Kind]++
	}
	return count[rootfs.Directory], count[rootfs.EROFS]
}

// sharingImages are two in a registry, one of two layers, and one of the same two and another.
func sharingImages(t *testing.T) (app, more string) {
	t.Helper()
	reg := registrytest.New(t)
	low, high := plain(t, "f", "1"), plain(t, "g", "2")
	reg.PutImage("app", "v1", "app", low, high)
	reg.PutImage("more", "v1", "more", low, high, plain(t, "h", "3"))
	return reg.Host() + "/app:v1", reg.Host() + "/more:v1"
}

// pulledAsBoth is a store with the first of them as directories, and the second as EROFS.
func pulledAsBoth(t *testing.T, cfg pull.Config) (s *node, app, more string) {
	t.Helper()
	app, more = sharingImages(t)
	s = restart(t, nil, with(cfg, "directory", nil))
	mustPull(t, s, app)
	s = restart(t, s, with(cfg, "auto", nil))
	mustPull(t, s, more)
	return s, app, more
}

// Layers exist only in the forms that images and containers use.
func TestUnusedFormsAreDeleted(t *testing.T) {
	cfg := driversConfig(t)
	s, app, more := pulledAsBoth(t, cfg)
	wantLayers(t, s, 2, 3)
	if _, err := s.Hold("container", mustGet(t, s, app).Layers); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), app); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, 2, 3)
	if err := s.Release("container"); err != nil {
		t.Fatal(err)
	}
	wantLayers(t, s, 0, 3)
	wantContent(t, s, more, "f", "1", rootfs.EROFS)

}

func TestKernelWithoutEROFSRemovesImages(t *testing.T) {
	cfg := driversConfig(t)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "app", plain(t, "f", "app"), plain(t, "g", "2"))
	reg.PutImage("kept", "v1", "kept", plain(t, "f", "kept"))
	app, kept := reg.Host()+"/app:v1", reg.Host()+"/kept:v1"
	s := restart(t, nil, with(cfg, "directory", works))
	mustPull(t, s, kept)
	s = restart(t, s, with(cfg, "auto", works))
	mustPull(t, s, app)
	wantContent(t, s, app, "f", "app", rootfs.EROFS)

	for range 2 {
		s = restart(t, s, with(cfg, "auto", cannot))
		_, err := s.Get(app)
		wantCode(t, err, codes.NotFound)
		wantContent(t, s, kept, "f", "kept", rootfs.Directory)
		if names, err := filepath.Glob(filepath.Join(cfg.Root, "records", "*")); err != nil || len(names) != 1 {
			t.Errorf("records %v, %v", names, err)
		}
		if _, err := os.Lstat(filepath.Join(cfg.Root, "erofs")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the EROFS layers are still there: %v", err)
		}
	}
	mustPull(t, s, app)
	wantContent(t, s, app, "f", "app", rootfs.Directory)
	s = restart(t, s, with(cfg, "auto", works))
	wantContent(t, s, app, "f", "app", rootfs.Directory)
	for _, img := range s.List() {
		if err := s.Remove(t.Context(), img.ID); err != nil {
			t.Fatal(err)
		}
	}
	wantEmpty(t, s)
}

// A daemon that was killed after it had removed the records leaves layers without images.
func TestKernelWithoutEROFSRemovesOrphanedLayers(t *testing.T) {
	cfg := driversConfig(t)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "app", plain(t, "f", "app"))
	s := restart(t, nil, with(cfg, "auto", works))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	if err := s.Records().Remove(image.RecordName(img.ID)); err != nil {
		t.Fatal(err)
	}
	s = restart(t, s, with(cfg, "auto", cannot))
	wantEmpty(t, s)
	if _, err := os.Lstat(filepath.Join(cfg.Root, "erofs")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the EROFS layers are still there: %v", err)
	}
}

// An image is removed only if all its layers are unmountable. A record with missing layers is set
// aside.
func TestKernelWithoutEROFSSetsAsideIncompleteImage(t *testing.T) {
	cfg := driversConfig(t)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "app", plain(t, "f", "app"), plain(t, "g", "2"))
	s := restart(t, nil, with(cfg, "auto", works))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	if err := s.Primary().Remove(img.Layers[0]); err != nil {
		t.Fatal(err)
	}
	s = restart(t, s, with(cfg, "auto", cannot))
	if list := s.List(); len(list) > 0 {
		t.Errorf("images %v", list)
	}
	if names, err := filepath.Glob(filepath.Join(cfg.Root, "records", "set-aside", "*")); err != nil || len(names) != 1 {
		t.Errorf("records set aside: %v, %v", names, err)
	}
}

// If no layer was ever an EROFS image, the store of EROFS layers is not created until it is needed.
func TestEROFSStoreIsCreatedOnFirstUse(t *testing.T) {
	for name, c := range map[string]struct {
		driver string
		probe  func(string) error
		made   bool
		want   rootfs.Kind
	}{
		"not asked for":   {"directory", works, false, rootfs.Directory},
		"an old kernel":   {"auto", cannot, false, rootfs.Directory},
		"not known":       {"auto", noRoom, false, rootfs.Directory},
		"works":           {"auto", works, true, rootfs.EROFS},
		"asked for":       {"erofs", noRoom, true, rootfs.EROFS},
		"nothing is said": {"", works, false, rootfs.Directory},
	} {
		cfg := with(pull.Config{Root: t.TempDir(), Pack: unpack.Pack}, c.driver, c.probe)
		s := openStore(t, cfg)
		_, err := os.Stat(filepath.Join(cfg.Root, "erofs"))
		if s.Driver() != c.want || (err == nil) != c.made {
			t.Errorf("%s: %s, %v", name, s.Driver(), err)
		}
	}
	_, err := open(t.Context(), pull.Config{Root: t.TempDir(), Driver: "zip"}, slog.New(slog.DiscardHandler))
	wantCode(t, err, codes.InvalidArgument)
}

// An image stays with its driver, even if its layers exist with another driver too.
func TestImageStaysWithItsDriver(t *testing.T) {
	cfg := driversConfig(t)
	s, app, more := pulledAsBoth(t, cfg)
	wantContent(t, s, more, "f", "1", rootfs.EROFS)
	wantContent(t, s, app, "f", "1", rootfs.Directory)
	if n := len(s.MergedChains()); n != 1 {
		t.Errorf("%d images of chains, of one that was pulled", n)
	}
}

// A merged image and its mount are removed with the last image that needs them, even if other
// images still use its layers.
func TestMergedImageIsRemovedWithItsImage(t *testing.T) {
	cfg := with(driversConfig(t), "erofs", nil)
	app, more := sharingImages(t)
	s := restart(t, nil, cfg)
	layers := mustPull(t, s, app).Layers
	mustPull(t, s, more)
	wantMerged := func(want int) {
		t.Helper()
		images, err := filepath.Glob(filepath.Join(cfg.Root, "erofs", "joins", "*", "image"))
		if err != nil || len(images) != want || len(s.MergedChains()) != want {
			t.Errorf("%d images of layers on disk, %d known, %v; want %d", len(images), len(s.MergedChains()), err, want)
		}
		if n := erofsMounts(t); n > want {
			t.Errorf("%d are mounted", n)
		}
	}
	wantMerged(2)
	if _, err := s.Hold("container", layers); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), app); err != nil {
		t.Fatal(err)
	}
	wantMerged(2)
	if err := s.Release("container"); err != nil {
		t.Fatal(err)
	}
	wantMerged(1)
	wantContent(t, s, more, "f", "1", rootfs.EROFS)
	mustPull(t, s, app)
	wantMerged(2)
	wantContent(t, s, app, "g", "2", rootfs.EROFS)

	// If the daemon is killed before that, the next start removes them.
	if err := s.Records().Remove(image.RecordName(s.Snapshot().ByName()[app].ID)); err != nil {
		t.Fatal(err)
	}
	s = restart(t, s, cfg)
	wantMerged(1)
	for _, ref := range []string{app, more} {
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	wantMerged(0)
	wantEmpty(t, s)
}

// erofsMounts is how many mounts this process has open.
func erofsMounts(t *testing.T) (n int) {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		var fs unix.Statfs_t
		if unix.Statfs("/proc/self/fd/"+f.Name(), &fs) == nil && fs.Type == unix.EROFS_SUPER_MAGIC_V1 {
			n++
		}
	}
	return n
}

// With "auto", an image that EROFS cannot take is stored as directories.
func TestImageTooLargeForEROFSBecomesDirectories(t *testing.T) {
	cfg := driversConfig(t)
	cfg.Pack = func(_ context.Context, _, _ *os.File, blob io.Reader, _ unpack.Job) (unpack.Result, error) {
		if _, err := io.Copy(io.Discard, blob); err != nil {
			return unpack.Result{}, err
		}
		return unpack.Result{}, &unpack.Error{Code: unpack.MoreMemory, Err: errors.New("its tree takes too much memory")}
	}
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	app := reg.Host() + "/app:v1"
	s := restart(t, nil, with(cfg, "erofs", nil))
	_, err := s.Pull(t.Context(), app, nil)
	wantCode(t, err, codes.FailedPrecondition, "too much memory")
	wantEmpty(t, s)
	s = restart(t, s, with(cfg, "auto", nil))
	if s.Driver() != rootfs.EROFS {
		t.Fatal("auto is not EROFS")
	}
	mustPull(t, s, app)
	wantContent(t, s, app, "f", "1", rootfs.Directory)

	// The layers that it did take are fetched again, and nothing is left of them.
	last := &countingPacker{refuse: 2}
	cfg.Pack = last.pack
	low, high := plain(t, "g", "2"), plain(t, "h", "3")
	reg.PutImage("big", "v1", "big", low, high)
	cfg.MaxParallelDownloads = 1
	s = restart(t, s, with(cfg, "auto", nil))
	mustPull(t, s, reg.Host()+"/big:v1")
	wantLayers(t, s, 3, 0)
	if last.calls != 2 {
		t.Errorf("%d layers were packed", last.calls)
	}
	if n := fetches(reg, low); n != 2 {
		t.Errorf("the layer that was packed was fetched %d times", n)
	}
	wantContent(t, s, reg.Host()+"/big:v1", "g", "2", rootfs.Directory)
	wantContent(t, s, reg.Host()+"/big:v1", "h", "3", rootfs.Directory)
}

// Layers that can be packed but not merged are fetched again as directories.
func TestImageTooLargeToMergeBecomesDirectories(t *testing.T) {
	cfg := driversConfig(t)
	reg := registrytest.New(t)
	layers := []registrytest.Layer{links(t, "a", 7500, 200, unix.PathMax-2), links(t, "b", 7500, 200, unix.PathMax-2)}
	reg.PutImage("big", "v1", "", layers...)
	big := reg.Host() + "/big:v1"
	s := restart(t, nil, with(cfg, "erofs", nil))
	_, err := s.Pull(t.Context(), big, nil)
	wantCode(t, err, codes.FailedPrecondition, "memory")
	wantEmpty(t, s)
	before := []int{fetches(reg, layers[0]), fetches(reg, layers[1])}
	s = restart(t, s, with(cfg, "auto", nil))
	mustPull(t, s, big)
	wantLayers(t, s, 2, 0)
	wantContent(t, s, big, "a/file", "a", rootfs.Directory)
	wantContent(t, s, big, "b/file", "b", rootfs.Directory)
	for i, l := range layers {
		if n := fetches(reg, l) - before[i]; n != 2 {
			t.Errorf("layer %d was fetched %d times", i, n)
		}
	}
}

// If an image is too large for EROFS, its next version reuses the existing layers as directories,
// also after a restart and after the removal of the first version. Only new layers are fetched. An
// image that shares few layers with it is stored as EROFS.
func TestNextVersionOfImageTooLargeToMerge(t *testing.T) {
	cfg := driversConfig(t)
	cfg.MergeMemory = 4 << 20
	reg := registrytest.New(t)
	layers := []registrytest.Layer{links(t, "a", 5000, 8, 8), links(t, "b", 5000, 8, 8)}
	small := plain(t, "small", "2")
	var s *node
	var last string
	for _, v := range []string{"v1", "v2", "v3"} {
		s = restart(t, s, with(cfg, "auto", nil))
		reg.PutImage("big", v, v, append(layers, plain(t, v, v), small)...)
		big := reg.Host() + "/big:" + v
		mustPull(t, s, big)
		wantContent(t, s, big, v, v, rootfs.Directory)
		if last != "" {
			if err := s.Remove(t.Context(), last); err != nil {
				t.Fatal(err)
			}
		}
		wantLayers(t, s, 4, 0)
		last = big
	}
	for i, l := range layers { // twice by the first pull, which tried EROFS
		if n := fetches(reg, l); n != 2 {
			t.Errorf("layer %d was fetched %d times", i, n)
		}
	}
	reg.PutImage("other", "v1", "other", small, layers[0], plain(t, "new", "3"))
	mustPull(t, s, reg.Host()+"/other:v1")
	wantContent(t, s, reg.Host()+"/other:v1", "small", "2", rootfs.EROFS)
}

// If EROFS cannot take a layer and directories can, the rest of the blob is not read first, because
// the blob is not at fault.
func TestLayerTooLargeIsNotReadToItsEnd(t *testing.T) {
	const size = 2 << 20 // the rest of a blob of this size would be read otherwise
	cfg := driversConfig(t)
	cfg.Pack = func(_ context.Context, _, _ *os.File, blob io.Reader, _ unpack.Job) (unpack.Result, error) {
		if _, err := io.ReadFull(blob, make([]byte, 512)); err != nil {
			return unpack.Result{}, err
		}
		return unpack.Result{}, &unpack.Error{Code: unpack.MoreMemory, Err: errors.New("its tree takes too much memory")}
	}
	got := &byteObserver{}
	cfg.Observer = got
	reg := registrytest.New(t)
	l := plain(t, "f", strings.Repeat("f", size))
	reg.PutImage("app", "v1", "", l)
	s := restart(t, nil, with(cfg, "auto", nil))
	mustPull(t, s, reg.Host()+"/app:v1")
	if n := got.bytes.Load(); n >= int64(2*len(l.Blob)) {
		t.Errorf("%d bytes were received of a layer of %d", n, len(l.Blob))
	}
}

// byteObserver counts received bytes.
type byteObserver struct {
	quietObserver
	bytes atomic.Int64
}

func (o *byteObserver) Received(_ string, n int) { o.bytes.Add(int64(n)) }

// links returns a layer of one directory with n dangling symlinks, whose names and targets have the
// given lengths. Its tree is large although it contains little.
func links(t *testing.T, dir string, n, name, target int) registrytest.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(hdr *tar.Header, content string) {
		hdr.Size = int64(len(content))
		if err := w.WriteHeader(hdr); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	add(&tar.Header{Typeflag: tar.TypeReg, Name: dir + "/file", Mode: 0o644}, dir)
	for i := range n {
		add(&tar.Header{Typeflag: tar.TypeSymlink, Name: fmt.Sprintf("%s/%0*d", dir, name, i), Linkname: strings.Repeat("t/", target/2)}, "")
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return zstandardOf(t, b.Bytes())
}

// fetches is how often a layer's blob was asked for.
func fetches(reg *registrytest.Server, l registrytest.Layer) int {
	return reg.Count("/blobs/" + digest.FromBytes(l.Blob).String())
}

// countingPacker packs layers until it refuses one.
type countingPacker struct{ calls, refuse int }

func (p *countingPacker) pack(ctx context.Context, data, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
	if p.calls++; p.calls < p.refuse {
		return unpack.Pack(ctx, data, tree, blob, job)
	}
	return unpack.Result{}, &unpack.Error{Code: unpack.MoreMemory, Err: errors.New("its tree takes too much memory")}
}

// Pulls, removals and containers of images that share their layers do not get in each other's way.
func TestConcurrentPullsRemovalsAndHoldsOfMergedImages(t *testing.T) {
	cfg := with(driversConfig(t), "erofs", nil)
	app, more := sharingImages(t)
	s := restart(t, nil, cfg)
	mustPull(t, s, more)
	done := make(chan error)
	for worker := range 4 {
		go func() {
			done <- func() error {
				for range 30 {
					img, err := s.Pull(t.Context(), app, nil)
					if err != nil {
						return err
					}
					holder := fmt.Sprint("container ", worker)
					spec, err := s.Hold(holder, img.Layers)
					if errdefs.IsNotFound(err) { // another worker has removed it
						continue
					}
					if err != nil {
						return err
					}
					if mount, err := spec.Mount(); err != nil {
						return fmt.Errorf("mount what is held: %w", err)
					} else if err := mount.Close(); err != nil {
						return err
					}
					if err := errors.Join(s.Remove(t.Context(), img.ID), s.Release(holder)); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := s.Remove(t.Context(), app); err != nil {
		t.Fatal(err)
	}
	if merged := s.MergedChains(); len(merged) != 1 {
		t.Errorf("images of layers: %v", merged)
	}
}
