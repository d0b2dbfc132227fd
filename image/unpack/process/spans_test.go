package process

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/unpack"
	"berth/image/unpack/inflate/inflatetest"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

const span = 500_000

// packWithPoints packs a blob and returns its compression and its points.
func packWithPoints(t *testing.T, p *Program, blob []byte) (kind blobindex.Compression, points []blobindex.Point) {
	t.Helper()
	dir := t.TempDir()
	create := func(name string) *os.File {
		f, err := os.Create(filepath.Join(dir, name))
		testutil.Must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	job := unpack.Job{Algorithm: digest.SHA256, Record: create("tar"), Points: create("points"), Span: span}
	if _, err := p.Pack(t.Context(), create("data"), create("tree"), bytes.NewReader(blob), job); err != nil {
		t.Fatal(err)
	}
	recorded, err := os.ReadFile(job.Points.Name())
	testutil.Must(t, err)
	if len(recorded) == 0 {
		return 0, nil
	}
	kind, points, err = blobindex.DecodeRecorded(recorded)
	testutil.Must(t, err)
	return kind, points
}

// mixedTar is a tar of text and of random bytes.
func mixedTar(t *testing.T) []byte {
	t.Helper()
	random := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(random)
	return pack(t, file("text", string(inflatetest.Sample(3<<20))), file("random", string(random)), file("zeros", string(make([]byte, 1<<20))))
}

// TestSpans decompresses a layer span by span with two builds, from the points that a third process
// has recorded.
func TestSpans(t *testing.T) {
	recorder := open(t, need(t, "isal"), time.Minute)
	data := mixedTar(t)
	frames := append(zstandard(t, data[:2<<20]), zstandard(t, data[2<<20:])...)
	for name, blob := range map[string][]byte{"gzip": gzipped(t, data), "zstd": frames, "plain": data} {
		kind, points := packWithPoints(t, recorder, blob)
		if len(points) < 2 {
			t.Errorf("%s: %d points", name, len(points))
			continue
		}
		for _, build := range []string{"go", "isal"} {
			t.Run(name+" by "+build, func(t *testing.T) {
				inflater, err := open(t, need(t, build), time.Minute).Inflate(t.TempDir(), kind, int64(len(data)))
				testutil.Must(t, err)
				for i, p := range points {
					inEnd, outEnd := len(blob), len(data)
					if i+1 < len(points) {
						inEnd, outEnd = int(points[i+1].In), int(points[i+1].Out)
					}
					got, err := inflater.Span(t.Context(), p, blob[p.In:inEnd], int64(outEnd)-p.Out)
					if err != nil || !bytes.Equal(got, data[p.Out:outEnd]) {
						t.Fatalf("span %d: %d bytes, %v", i, len(got), err)
					}
				}
				testutil.Must(t, inflater.Close())
			})
		}
	}
}

// TestPointsNeedISAL checks that a gzip has no points without ISA-L, and that its layer is packed.
func TestPointsNeedISAL(t *testing.T) {
	if _, points := packWithPoints(t, open(t, built, time.Minute), gzipped(t, mixedTar(t))); points != nil {
		t.Errorf("%d points", len(points))
	}
}

// TestSparseFilesHaveNoPoints checks that a layer gets no index if its data is not that of its tar.
func TestSparseFilesHaveNoPoints(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("data"), 0o600))
	testutil.Must(t, os.Truncate(filepath.Join(dir, "f"), 1<<20))
	for _, form := range []string{"gnu", "posix"} {
		blob, err := exec.Command("tar", "-c", "--sparse", "--format="+form, "-C", dir, "f").Output()
		testutil.Must(t, err)
		if _, points := packWithPoints(t, open(t, built, time.Minute), blob); points != nil {
			t.Errorf("%s: %d points", form, len(points))
		}
	}
}

func TestWrongSpans(t *testing.T) {
	p := open(t, built, time.Minute)
	blob := gzipped(t, inflatetest.Sample(1<<20))
	start := blobindex.Point{Start: true}
	inflater, err := p.Inflate(t.TempDir(), blobindex.Gzip, 1<<20)
	testutil.Must(t, err)
	defer inflater.Close()
	for name, tc := range map[string]struct {
		in  []byte
		out int64
	}{
		"truncated":  {blob[:1000], 1 << 20},
		"too short":  {blob, 1<<20 + 1},
		"no gzip":    {[]byte("text"), 4},
		"too long":   {blob, blobindex.MaxSpan + 1},
		"negative":   {blob, -1},
		"empty span": {nil, 1},
	} {
		if _, err := inflater.Span(t.Context(), start, tc.in, tc.out); errdefs.Code(err) != codes.DataLoss {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got, err := inflater.Span(t.Context(), start, blob, 1<<20); err != nil || len(got) != 1<<20 {
		t.Errorf("after errors: %d bytes, %v", len(got), err)
	}
}

// TestSpanOfDeadProcess checks the errors of a process that dies or does not answer, and of a
// caller that leaves.
func TestSpanOfDeadProcess(t *testing.T) {
	p := open(t, built, time.Minute)
	blob := gzipped(t, inflatetest.Sample(1<<20))
	inflater, err := p.Inflate(t.TempDir(), blobindex.Gzip, 1<<20)
	testutil.Must(t, err)
	inflater.w.Kill()
	if _, err := inflater.Span(t.Context(), blobindex.Point{Start: true}, blob, 1<<20); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("dead: %v", err)
	}
	testutil.Must(t, inflater.Close())

	silent, err := open(t, "/proc/self/exe", 50*time.Millisecond).Inflate(t.TempDir(), blobindex.Gzip, 1<<20)
	testutil.Must(t, err)
	if _, err := silent.Span(t.Context(), blobindex.Point{Start: true}, blob, 1<<20); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("silent: %v", err)
	}
	testutil.Must(t, silent.Close())

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	left, err := liar(t).Inflate(t.TempDir(), blobindex.Gzip, 1<<20)
	testutil.Must(t, err)
	if _, err := left.Span(ctx, blobindex.Point{Start: true}, blob, 1<<20); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	testutil.Must(t, left.Close())
}

// Without data, everything else is the same: the result, the tree, the record and the length of the
// data file.
func TestPackWithoutData(t *testing.T) {
	p := open(t, need(t, "go"), time.Minute)
	blob := mixedTar(t)
	var results [2]unpack.Result
	var files [2][3][]byte
	for i, without := range []bool{false, true} {
		dir := t.TempDir()
		var out [3]*os.File
		for k, name := range []string{"data", "tree", "tar"} {
			f, err := os.Create(filepath.Join(dir, name))
			testutil.Must(t, err)
			defer f.Close()
			out[k] = f
		}
		job := unpack.Job{Algorithm: digest.SHA256, Record: out[2], NoData: without}
		made, err := p.Pack(t.Context(), out[0], out[1], bytes.NewReader(blob), job)
		testutil.Must(t, err)
		results[i] = made
		for k := range out {
			files[i][k], err = os.ReadFile(out[k].Name())
			testutil.Must(t, err)
		}
	}
	if results[0].Digest != results[1].Digest || results[0].Summary != results[1].Summary || results[0].TarBytes != int64(len(blob)) {
		t.Errorf("%+v, without data %+v", results[0], results[1])
	}
	if !bytes.Equal(files[0][1], files[1][1]) || !bytes.Equal(files[0][2], files[1][2]) {
		t.Error("another tree or record")
	}
	if len(files[0][0]) != len(files[1][0]) || bytes.ContainsFunc(files[1][0], func(r rune) bool { return r != 0 }) {
		t.Errorf("%d bytes of data, and without data %d", len(files[0][0]), len(files[1][0]))
	}
}
