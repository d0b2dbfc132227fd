package fill

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// All ways to read a file get its content, while it is being filled.
func TestReads(t *testing.T) {
	for name, read := range map[string]func(string) ([]byte, error){
		"read": os.ReadFile, "mmap": readMap, "direct": readDirect, "splice": readSplice, "sendfile": readSendfile,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 40, nil)
			root := mounted(t, w.dir)
			w.open()
			w.e.Start()
			testutil.Must(t, w.layer.check(root, read))
			w.wait(t)
			testutil.Must(t, w.l.Err())
			testutil.Must(t, w.layer.check(root, read))
			if got := w.e.Stats(); got.Waiting != 0 || got.Denied != 0 || got.Layers != 0 || got.Events == 0 {
				t.Errorf("%+v", got)
			}
			if n := w.inflaters.Load(); n != 0 {
				t.Errorf("%d inflaters are left", n)
			}
		})
	}
}

// A complete layer has the files of an eager one. Its mark is removed.
func TestComplete(t *testing.T) {
	w := newWorld(t, 40, nil)
	w.open()
	w.e.Start()
	w.wait(t)
	testutil.Must(t, w.l.Err())
	if !w.l.Complete() {
		t.Error("it is not complete")
	}
	if filled, total := w.l.Progress(); filled != total || total != int64(len(w.layer.blob)) {
		t.Errorf("%d of %d bytes", filled, total)
	}
	before := w.e.Stats().Events
	root := mounted(t, w.dir)
	testutil.Must(t, w.layer.check(root, os.ReadFile))
	if got := w.e.Stats().Events; got != before {
		t.Errorf("%d events after the completion", got-before)
	}
	f, err := os.Open(filepath.Join(w.dir, DataFile))
	testutil.Must(t, err)
	defer f.Close()
	if incomplete, err := isIncomplete(int(f.Fd())); incomplete || err != nil {
		t.Errorf("marked as incomplete: %v, %v", incomplete, err)
	}
	testutil.Must(t, w.l.Close())
	if n := w.source.bytes.Load(); n > int64(len(w.layer.blob))*3/2 {
		t.Errorf("%d bytes were requested for a blob of %d", n, len(w.layer.blob))
	}
}

// Only what is read is fetched before the rest, and each span once.
func TestSingleFlight(t *testing.T) {
	w := newWorld(t, 200, nil)
	root := mounted(t, w.dir)
	w.e.Start()
	var readers errgroup.Group
	for range 32 {
		readers.Go(func() error { return w.layer.check(root, os.ReadFile) })
	}
	testutil.Eventually(t, "readers wait", func() bool { return w.e.Stats().Waiting > 0 })
	w.open()
	testutil.Must(t, readers.Wait())
	w.wait(t)
	testutil.Must(t, w.l.Err())
	if n, most := w.source.bytes.Load(), int64(len(w.layer.blob)+2*w.l.x.Spans()*blobindex.Grid); n > most {
		t.Errorf("%d bytes were requested, at most %d are needed", n, most)
	}
}

// A file whose spans are filled can be read while the source is stuck.
func TestFilledRangesNeedNoSource(t *testing.T) {
	w := newWorld(t, 100, nil)
	root := mounted(t, w.dir)
	w.open()
	w.e.Start()
	var name string
	for name = range w.layer.files {
		if len(w.layer.files[name]) > 100 {
			break
		}
	}
	got, err := os.ReadFile(filepath.Join(root, name))
	testutil.Must(t, err)
	if !bytes.Equal(got, w.layer.files[name]) {
		t.Error("wrong content")
	}
	w.source.set(errors.New("no network"), nil, false)
	again, err := os.ReadFile(filepath.Join(mounted(t, w.dir), name)) // another mount has no cache of it
	testutil.Must(t, err)
	if !bytes.Equal(again, got) {
		t.Error("wrong content")
	}
}

// An overlay copies a file up with its content, and shows it.
func TestOverlay(t *testing.T) {
	w := newWorld(t, 40, nil)
	l := writeImage(t, w.dir)
	var err error
	l.Mount, err = l.Open()
	testutil.Must(t, err)
	upper := filepath.Join(filepath.Dir(w.dir), "upper")
	for _, dir := range []string{"upper", "work", "merged"} {
		testutil.Must(t, os.MkdirAll(filepath.Join(upper, dir), 0o700))
	}
	merged := filepath.Join(upper, "merged")
	target := filepath.Join(upper, "lower")
	testutil.Must(t, os.Mkdir(target, 0o700))
	testutil.Must(t, unix.MoveMount(int(l.Mount.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH))
	defer func() { testutil.Must(t, unix.Unmount(target, 0)) }()
	testutil.Must(t, l.Mount.Close())
	testutil.Must(t, unix.Mount("overlay", merged, "overlay", 0,
		fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", target, upper, upper)))
	defer func() { testutil.Must(t, unix.Unmount(merged, 0)) }()
	w.open()
	w.e.Start()
	for name, want := range w.layer.files {
		f, err := os.OpenFile(filepath.Join(merged, name), os.O_WRONLY|os.O_APPEND, 0) // copies it up
		testutil.Must(t, err)
		_, err = f.WriteString("more")
		testutil.Must(t, errors.Join(err, f.Close()))
		got, err := os.ReadFile(filepath.Join(merged, name))
		testutil.Must(t, err)
		if string(got) != string(want)+"more" {
			t.Errorf("%s has %d bytes, want %d", name, len(got), len(want)+4)
		}
	}
}

// Many readers in other processes get the right bytes, also where some of them are killed.
func TestReadersAreKilled(t *testing.T) {
	w := newWorld(t, 60, nil)
	root := mounted(t, w.dir)
	w.e.Start()
	var names []string
	for name, content := range w.layer.files {
		if len(content) > 0 {
			names = append(names, name)
		}
	}
	var killed []*exec.Cmd
	for i := range 12 {
		cmd := exec.Command("cat", filepath.Join(root, names[i%len(names)]))
		cmd.Path = "/bin/cat"
		f, err := os.Open(filepath.Join(root, names[i%len(names)]))
		testutil.Must(t, err)
		cmd.Args = []string{"cat"}
		cmd.Stdin = f
		testutil.Must(t, cmd.Start())
		testutil.Must(t, f.Close())
		killed = append(killed, cmd)
	}
	testutil.Eventually(t, "readers wait", func() bool { return w.e.Stats().Waiting >= 12 })
	for _, cmd := range killed {
		testutil.Must(t, cmd.Process.Kill())
		if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("killed reader: %v", err)
		}
	}
	w.open()
	testutil.Must(t, w.layer.check(root, os.ReadFile))
	w.wait(t)
	testutil.Must(t, w.l.Err())
	testutil.Eventually(t, "all events are answered", func() bool { return w.e.Stats().Waiting == 0 })
}

// Without a source a reader gets EIO after the limit. Later reads try again.
func TestStall(t *testing.T) {
	w := newWorld(t, 40, func(c *Config) { c.Stall = 50 * time.Millisecond })
	root := mounted(t, w.dir)
	w.source.set(errors.New("no network"), nil, false)
	w.e.Start()
	for name, want := range w.layer.files {
		got, err := os.ReadFile(filepath.Join(root, name))
		if len(want) > 0 && !errors.Is(err, unix.EIO) {
			t.Fatalf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	if s := w.e.Stats(); s.Denied == 0 || s.Failures == 0 || s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
	testutil.Must(t, w.l.Err())
	w.open()
	w.wait(t) // it tries again in the background, too
	testutil.Must(t, w.layer.check(root, os.ReadFile))
}

// Wrong bytes never reach a reader. After several attempts the layer is given up.
func TestWrongBytes(t *testing.T) {
	w := newWorld(t, 40, nil)
	root := mounted(t, w.dir)
	w.source.set(nil, nil, true)
	w.e.Start()
	for name, want := range w.layer.files {
		if got, err := os.ReadFile(filepath.Join(root, name)); len(want) > 0 && !errors.Is(err, unix.EIO) {
			t.Fatalf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	<-w.l.Done()
	if err := w.l.Err(); errdefs.Code(err) != codes.DataLoss || !errors.Is(err, blobindex.ErrMismatch) {
		t.Error(err)
	}
	if w.source.rejected.Load() < maxMismatches {
		t.Errorf("%d ranges were rejected", w.source.rejected.Load())
	}
	if w.l.Complete() {
		t.Error("it is complete")
	}
	testutil.Eventually(t, "all failed reads are counted", func() bool {
		n, last := w.l.Refused()
		return n > 0 && n == w.e.Stats().Denied && !last.IsZero()
	})
}

// One host sends wrong bytes to all requests of a moment. That counts once.
func TestWrongBytesAtTheSameTime(t *testing.T) {
	w := newWorld(t, 40, nil)
	for round := range maxMismatches {
		if w.l.Err() != nil {
			t.Fatalf("the layer was given up in round %d: %v", round, w.l.Err())
		}
		for range maxRunners[forFaults] + maxRunners[inBackground] {
			w.l.after(job{mismatches: round}, blobindex.ErrMismatch)
		}
	}
	if !errors.Is(w.l.Err(), blobindex.ErrMismatch) {
		t.Error(w.l.Err())
	}
}

// One host with wrong bytes does no harm.
func TestWrongBytesOnce(t *testing.T) {
	w := newWorld(t, 40, nil)
	root := mounted(t, w.dir)
	w.source.set(nil, nil, true)
	w.e.Start()
	testutil.Eventually(t, "a range was rejected", func() bool { return w.source.rejected.Load() > 0 })
	w.open()
	if err := w.layer.check(root, os.ReadFile); err != nil && w.l.Err() == nil {
		t.Error(err)
	}
}

// An index that does not fit the blob is found, before or after a span is written.
func TestWrongIndex(t *testing.T) {
	t.Run("length", func(t *testing.T) {
		w := newWorld(t, 40, nil)
		root := mounted(t, w.dir)
		w.inflate = func() (Inflater, error) { w.inflaters.Add(1); return &fakeInflater{true, &w.inflaters}, nil }
		w.open()
		w.e.Start()
		w.wait(t)
		if errdefs.Code(w.l.Err()) != codes.DataLoss {
			t.Error(w.l.Err())
		}
		for name, want := range w.layer.files {
			if _, err := os.ReadFile(filepath.Join(root, name)); len(want) > 0 && !errors.Is(err, unix.EIO) {
				t.Fatal(name, err)
			}
		}
	})
	t.Run("digest", func(t *testing.T) {
		w := newWorld(t, 40, nil)
		root := mounted(t, w.dir)
		w.l.x.DiffID = w.l.x.Blob
		w.open()
		w.e.Start()
		w.wait(t)
		if errdefs.Code(w.l.Err()) != codes.DataLoss || w.l.Complete() {
			t.Error(w.l.Err())
		}
		for name, want := range w.layer.files {
			if _, err := os.ReadFile(filepath.Join(root, name)); len(want) > 0 && !errors.Is(err, unix.EIO) {
				t.Fatal(name, err)
			}
		}
	})
	t.Run("record", func(t *testing.T) {
		w := newWorld(t, 40, nil)
		x := *w.layer.x
		x.DataSize = 4096
		dir := w.layer.write(t, w.dir+"2")
		if _, err := w.e.Add(dir, &x, w.source, w.inflate, nil); errdefs.Code(err) != codes.DataLoss {
			t.Error(err)
		}
		testutil.Must(t, w.e.Refuse(dir))
		w.e.Start()
		root := mounted(t, dir)
		for name, want := range w.layer.files {
			if _, err := os.ReadFile(filepath.Join(root, name)); len(want) > 0 && !errors.Is(err, unix.EIO) {
				t.Fatal(name, err)
			}
		}
	})
}

// Most of the tar is hashed before the last span is filled. If that fails, the whole tar is hashed
// at the end.
func TestTarIsHashedAhead(t *testing.T) {
	for _, fails := range []bool{false, true} {
		w := newWorld(t, 40, nil)
		if fails {
			w.l.hashed(0, errors.New("no memory"))
		}
		w.open()
		w.e.Start()
		w.wait(t)
		if !w.l.Complete() || (w.l.hashedTo == 0) != fails || w.l.x.TarSize-w.l.hashedTo >= 10_000 && !fails {
			t.Errorf("%d of %d bytes were hashed before: %v", w.l.hashedTo, w.l.x.TarSize, w.l.Err())
		}
	}
}

// A full disk fails readers after the limit only. Nothing is lost.
func TestDiskFull(t *testing.T) {
	var full atomic.Bool
	full.Store(true)
	w := newWorld(t, 40, func(c *Config) {
		c.Stall = 50 * time.Millisecond
		c.Room = func() error {
			if full.Load() {
				return unix.ENOSPC
			}
			return nil
		}
	})
	root := mounted(t, w.dir)
	w.open()
	w.e.Start()
	for name, want := range w.layer.files {
		if _, err := os.ReadFile(filepath.Join(root, name)); len(want) > 0 && !errors.Is(err, unix.EIO) {
			t.Fatal(name, err)
		}
	}
	full.Store(false)
	w.wait(t)
	testutil.Must(t, w.l.Err())
	testutil.Must(t, w.layer.check(root, os.ReadFile))
}

// The next Engine goes on with what is recorded.
func TestNextEngine(t *testing.T) {
	w := newWorld(t, 200, nil)
	w.source.set(nil, nil, false)
	w.e.Start()
	testutil.Eventually(t, "something is recorded", func() bool {
		f, err := os.Open(filepath.Join(w.dir, FilledFile))
		testutil.Must(t, err)
		defer f.Close()
		b, err := readBitmap(f, w.l.x.Spans())
		testutil.Must(t, err)
		return bytes.Count(b, []byte{0}) < len(b)
	})
	testutil.Must(t, w.e.Close())
	cfg := w.e.cfg
	cfg.Group, cfg.Ring = nil, nil
	var err error
	before := w.source.bytes.Load()
	w.e, err = Open(cfg)
	testutil.Must(t, err)
	if w.e.TookOver() {
		t.Error("it took over a group that is gone")
	}
	w.l, err = w.e.Add(w.dir, w.layer.x, w.source, func() (Inflater, error) { return w.inflate() }, nil)
	testutil.Must(t, err)
	root := mounted(t, w.dir)
	w.e.Start()
	w.wait(t) // without readers, whose requests may overlap with those of the filling
	testutil.Must(t, w.l.Err())
	if again := w.source.bytes.Load() - before; again >= w.l.x.BlobSize {
		t.Errorf("%d bytes were requested again of %d", again, w.l.x.BlobSize)
	}
	testutil.Must(t, w.layer.check(root, os.ReadFile))
}

// Closing the Engine or a layer leaves no goroutine and no descriptor, and readers do not get
// zeros.
func TestCloseLayer(t *testing.T) {
	w := newWorld(t, 40, nil)
	root := mounted(t, w.dir)
	w.e.Start()
	var reader errgroup.Group
	var name string
	for name = range w.layer.files {
		if len(w.layer.files[name]) > 0 {
			break
		}
	}
	reader.Go(func() error { _, err := os.ReadFile(filepath.Join(root, name)); return err })
	testutil.Eventually(t, "the reader waits", func() bool { return w.e.Stats().Waiting > 0 })
	testutil.Must(t, w.l.Close())
	if err := reader.Wait(); !errors.Is(err, unix.EIO) {
		t.Errorf("reader of a closed layer: %v", err)
	}
	if n, _ := w.l.Refused(); n == 0 {
		t.Error("the failed read is not counted")
	}
	if _, err := os.ReadFile(filepath.Join(root, name)); !errors.Is(err, unix.EIO) {
		t.Errorf("later reader: %v", err)
	}
}

// The memory of the spans that are filled is limited: here, to one of them at a time.
func TestMemoryIsLimited(t *testing.T) {
	w := newWorld(t, 200, func(c *Config) { c.Memory = 2 * testSpan })
	root := mounted(t, w.dir)
	w.open()
	w.e.Start()
	var readers errgroup.Group
	for range 8 {
		readers.Go(func() error { return w.layer.check(root, os.ReadFile) })
	}
	testutil.Must(t, readers.Wait())
	w.wait(t)
	testutil.Must(t, w.l.Err())
	if w.source.limits.Load() > 1 {
		t.Errorf("%d requests at a time", w.source.limits.Load())
	}
}

// Preferred spans come first.
func TestPrefer(t *testing.T) {
	w := newWorld(t, 300, nil)
	w.source.set(nil, nil, false)
	last := w.l.x.Spans() - 1
	w.l.Prefer([]int{last, -1, 1 << 20, last / 2})
	source := &ordered{Source: w.source}
	w.l.source = source
	w.e.Start()
	w.wait(t)
	testutil.Must(t, w.l.Err())
	at, _ := w.l.x.GridRange(last, last)
	if len(source.offsets) < 2 || source.offsets[0] != at {
		t.Errorf("requests at %d, the first should be %d", source.offsets, at)
	}
}

type ordered struct {
	Source
	mu      sync.Mutex
	offsets []int64
}

func (o *ordered) Range(ctx context.Context, offset, size int64) (io.ReadCloser, error) {
	o.mu.Lock()
	o.offsets = append(o.offsets, offset)
	o.mu.Unlock()
	return o.Source.Range(ctx, offset, size)
}

// An index of chunks is proven before its layer is complete. A proof that fails is tried again. One
// that cannot be made within some attempts, or shows a lie, ends the layer.
func TestProof(t *testing.T) {
	for name, test := range map[string]struct {
		failures int // before the result
		result   error
		complete bool
		calls    int
	}{
		"true":            {0, nil, true, 1},
		"later":           {3, nil, true, 4},
		"lie":             {1, errdefs.New(codes.DataLoss, "another tree"), false, 2},
		"cannot be shown": {100, nil, false, 10},
	} {
		t.Run(name, func(t *testing.T) {
			layer := makeLayer(t, 1, 40, blobindex.Gzip)
			layer.chunked(t)
			calls := 0
			w := newWorldWith(t, layer, nil, func(_ context.Context, blob *io.SectionReader) error {
				if calls++; calls <= test.failures {
					return errors.New("no memory")
				}
				got, err := io.ReadAll(blob)
				if err != nil || digest.FromBytes(got) != layer.x.Blob {
					t.Errorf("the blob has %d bytes: %v", len(got), err)
				}
				return test.result
			})
			root := mounted(t, w.dir)
			w.e.Start()
			w.open()
			w.wait(t)
			if w.l.Complete() != test.complete || calls != test.calls {
				t.Errorf("complete %v after %d proofs", w.l.Complete(), calls)
			}
			if !test.complete && errdefs.Code(w.l.Err()) != codes.DataLoss {
				t.Error(w.l.Err())
			}
			err := w.layer.check(root, os.ReadFile)
			if (err == nil) != test.complete {
				t.Errorf("reads: %v", err)
			}
		})
	}
}

// Spans without content are not fetched.
func TestOwnIndexNeedsContentOnly(t *testing.T) {
	layer := emptyFiles(t, blobindex.None)
	w := newWorldOf(t, layer, nil)
	w.open()
	w.e.Start()
	w.wait(t)
	testutil.Must(t, w.l.Err())
	if n := w.source.bytes.Load(); n == 0 || n >= layer.x.BlobSize/2 {
		t.Errorf("%d bytes were requested of %d", n, layer.x.BlobSize)
	}
}
