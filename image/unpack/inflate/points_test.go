package inflate

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	fast "github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"berth/image/blobindex"
	"berth/image/unpack/inflate/inflatetest"
	"berth/image/unpack/isal"
)

// readPoints decompresses a blob with reads of readSize bytes. It returns the tar and the points,
// or the reason why there are none.
func readPoints(t testing.TB, blob io.Reader, readSize int, span int64) (
	tar []byte, kind blobindex.Compression, points []blobindex.Point, none error,
) {
	t.Helper()
	var recorded bytes.Buffer
	r, err := NewReader(blob, MaxWindow, blobindex.NewRecorder(&recorded, span))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	buf := make([]byte, readSize)
	for err == nil {
		var n int
		n, err = r.Read(buf)
		tar = append(tar, buf[:n]...)
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if none = r.EndPoints(); none != nil {
		return tar, 0, nil, none
	}
	kind, points, err = blobindex.DecodeRecorded(recorded.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return tar, kind, points, nil
}

// checkPoints decompresses each span from its point and compares it with the tar.
func checkPoints(t testing.TB, blob, tar []byte, kind blobindex.Compression, points []blobindex.Point) {
	t.Helper()
	for i := range points {
		p := &points[i]
		inEnd, outEnd := int64(len(blob)), int64(len(tar))
		if i+1 < len(points) {
			inEnd, outEnd = points[i+1].In, points[i+1].Out
		}
		in, want := blob[p.In:inEnd], tar[p.Out:outEnd]
		got := make([]byte, len(want))
		if err := Span(kind, p, in, got, MaxWindow); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("span %d from %d, bits %d, start %v, %d bytes: %v", i, p.In, p.Bits, p.Start, len(want), err)
		}
		if kind == blobindex.Gzip {
			checkByGo(t, p, in, want)
		}
	}
	if len(points) == 0 {
		return
	}
	last := points[len(points)-1]
	if err := Span(kind, &last, blob[last.In:], make([]byte, int64(len(tar))-last.Out+1), MaxWindow); err == nil {
		t.Fatalf("the last span has more than %d bytes", int64(len(tar))-last.Out)
	}
}

// checkByGo decompresses a span with Go's packages.
func checkByGo(t testing.TB, p *blobindex.Point, in, want []byte) {
	t.Helper()
	dictionary, err := p.Dictionary()
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if err := spanByGo(p, dictionary, in, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("span from %d, bits %d, start %v, %d bytes, by Go: %v", p.In, p.Bits, p.Start, len(want), err)
	}
}

// mixed returns data of all kinds: text, random bytes, zeros, short repetitions.
func mixed(size int) []byte {
	r := rand.New(rand.NewPCG(7, 7))
	text := inflatetest.Sample(size)
	var out []byte
	for len(out) < size {
		n := 1 + r.IntN(200_000)
		switch r.IntN(4) {
		case 0:
			out = append(out, text[len(out):min(len(out)+n, size)]...)
		case 1:
			for range n / 4 {
				out = append(out, byte(r.Uint32()))
			}
		case 2:
			out = append(out, make([]byte, n)...)
		case 3:
			out = append(out, bytes.Repeat(text[:1+r.IntN(9)], n/5)...)
		}
	}
	return out[:size]
}

// flushed compresses data like pigz: it flushes after each piece.
func flushed(t testing.TB, data []byte, piece int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	for part := range slices.Chunk(data, piece) {
		_, err := w.Write(part)
		if err := errors.Join(err, w.Flush()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// members compresses each piece as a member of its own.
func members(t testing.TB, data []byte, piece int) (blob []byte) {
	t.Helper()
	for part := range slices.Chunk(data, piece) {
		blob = append(blob, gzipped(t, part)...)
	}
	return blob
}

// byProgram compresses data with a program.
func byProgram(t testing.TB, data []byte, name string, args ...string) []byte {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		return nil
	}
	cmd := exec.Command(path, args...)
	cmd.Stdin = bytes.NewReader(data)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v", name, args, err)
	}
	return out
}

func byKlauspost(t testing.TB, data []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := fast.NewWriterLevel(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(data)
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func byGoLevel(t testing.TB, data []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(data)
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// gzips returns gzips of data by various programs. All have many blocks.
func gzips(t testing.TB, data []byte) map[string][]byte {
	t.Helper()
	blobs := map[string][]byte{
		"flushed":       flushed(t, data, 128<<10),
		"fixed blocks":  flushed(t, data[:min(200_000, len(data))], 60),
		"small blocks":  flushed(t, data[:min(1<<20, len(data))], 1000),
		"members":       members(t, data, 300_001),
		"small members": members(t, data[:min(500_000, len(data))], 1003),
		"padded":        append(flushed(t, data, 128<<10), make([]byte, 10240)...),
		"empty members": slices.Concat(gzipped(t, nil), gzipped(t, data[:len(data)/3]), gzipped(t, nil), gzipped(t, nil),
			gzipped(t, data[len(data)/3:]), gzipped(t, nil)),
	}
	for _, level := range []int{gzip.HuffmanOnly, gzip.NoCompression, gzip.BestSpeed, 6, gzip.BestCompression} {
		blobs[fmt.Sprintf("Go, level %d", level)] = byGoLevel(t, data, level)
		blobs[fmt.Sprintf("klauspost, level %d", level)] = byKlauspost(t, data, level)
	}
	for _, args := range [][]string{{"gzip", "-1"}, {"gzip", "-6"}, {"gzip", "-9"}, {"gzip", "--rsyncable"}, {"igzip", "-0", "-c"},
		{"igzip", "-3", "-c"}, {"pigz", "-6"}, {"pigz", "-i"}, {"pigz", "-11"}} {
		if blob := byProgram(t, data, args[0], args[1:]...); blob != nil {
			blobs[fmt.Sprint(args)] = blob
		}
	}
	return blobs
}

// contents are the tars of the tests. The points do not depend on whether they are valid tars.
func contents() map[string][]byte {
	random := make([]byte, 1<<20)
	source := rand.NewChaCha8([32]byte{9})
	_, _ = source.Read(random)
	return map[string][]byte{
		"mixed": mixed(3 << 20), "text": inflatetest.Sample(1 << 20), "random": random, "zeros": make([]byte, 10<<20),
	}
}

const testSpan = 100_000

func needISAL(t testing.TB) {
	t.Helper()
	if !isal.Works() {
		t.Skip("points in gzip need ISA-L")
	}
}

// TestPointsOfGzip decompresses gzips of many programs from each of their points.
func TestPointsOfGzip(t *testing.T) {
	needISAL(t)
	for content, data := range contents() {
		for program, blob := range gzips(t, data) {
			t.Run(content+", "+program, func(t *testing.T) {
				tar, kind, points, err := readPoints(t, bytes.NewReader(blob), 256<<10, testSpan)
				if err != nil || kind != blobindex.Gzip {
					t.Fatal(kind, err)
				}
				if !bytes.HasPrefix(data, tar) {
					t.Fatal("the tar is another")
				}
				checkPoints(t, blob, tar, kind, points)
				// Points are where blocks begin. Go 1.27 writes long blocks for data that repeats.
				if strings.HasPrefix(program, "[gzip") || program == "flushed" {
					checkDistances(t, tar, points, content)
				}
			})
		}
	}
}

// checkDistances checks that spans are not much longer than they should be. A block of zlib has at
// most 32,767 symbols, which are 8 MB of zeros, and usually some 100 KB. Other programs have no
// limit: igzip -0 makes a single block.
func checkDistances(t *testing.T, tar []byte, points []blobindex.Point, content string) {
	t.Helper()
	most := int64(testSpan + 600_000)
	if content == "zeros" || content == "mixed" {
		most = testSpan + 9<<20
	}
	for i := range points {
		end := int64(len(tar))
		if i+1 < len(points) {
			end = points[i+1].Out
			if end-points[i].Out < testSpan {
				t.Errorf("span %d has %d bytes", i, end-points[i].Out)
			}
		}
		if end-points[i].Out > most {
			t.Errorf("span %d has %d bytes", i, end-points[i].Out)
		}
	}
}

// TestPointsOfDividedInput checks points where input and output come in pieces of any size.
func TestPointsOfDividedInput(t *testing.T) {
	needISAL(t)
	data := mixed(150_000)
	for program, blob := range gzips(t, data) {
		for name, read := range map[string]struct {
			from io.Reader
			size int
		}{
			"one byte in":        {iotest.OneByteReader(bytes.NewReader(blob)), 256 << 10},
			"one byte out":       {bytes.NewReader(blob), 1},
			"one byte in, out":   {iotest.OneByteReader(bytes.NewReader(blob)), 1},
			"halves":             {iotest.HalfReader(bytes.NewReader(blob)), 1000},
			"33 KB out":          {bytes.NewReader(blob), 33_000},
			"EOF with last data": {iotest.DataErrReader(bytes.NewReader(blob)), 7001},
		} {
			t.Run(program+", "+name, func(t *testing.T) {
				tar, kind, points, err := readPoints(t, read.from, read.size, 10_000)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.HasPrefix(data, tar) {
					t.Fatal("the tar is another")
				}
				checkPoints(t, blob, tar, kind, points)
			})
		}
	}
}

// chunked returns at most size bytes in each Read.
type chunked struct {
	io.Reader
	size int
}

func (c chunked) Read(p []byte) (int, error) { return c.Reader.Read(p[:min(len(p), c.size)]) }

// TestPointsOfChunkedInput checks points where the input ends in the middle of long blocks.
func TestPointsOfChunkedInput(t *testing.T) {
	needISAL(t)
	data := inflatetest.Sample(4 << 20)
	for _, level := range []int{1, 6} {
		blob := byGoLevel(t, data, level)
		for _, chunk := range []int{997, 5000, 9000, 20_000, 33_000} {
			for _, size := range []int{4 << 10, 40_000, 256 << 10} {
				t.Run(fmt.Sprintf("level %d, %d in, %d out", level, chunk, size), func(t *testing.T) {
					tar, kind, points, err := readPoints(t, chunked{bytes.NewReader(blob), chunk}, size, testSpan)
					if err != nil || !bytes.Equal(tar, data) {
						t.Fatal(err)
					}
					if chunk == 5000 && size == 40_000 {
						checkPoints(t, blob, tar, kind, points)
					}
				})
			}
		}
	}
}

// skippable is a frame without content.
func skippable(n int) []byte {
	return append([]byte{0x50, 0x2a, 0x4d, 0x18, byte(n), byte(n >> 8), byte(n >> 16), 0}, make([]byte, n)...)
}

func TestPointsOfZstd(t *testing.T) {
	data := mixed(2 << 20)
	framed := func(size int, options ...zstd.EOption) (blob []byte) {
		w, err := zstd.NewWriter(nil, options...)
		if err != nil {
			t.Fatal(err)
		}
		for part := range slices.Chunk(data, size) {
			blob = w.EncodeAll(part, blob)
		}
		return blob
	}
	for name, blob := range map[string][]byte{
		"frames":             framed(300_000),
		"small frames":       framed(3000),
		"frames without CRC": framed(300_000, zstd.WithEncoderCRC(false)),
		"skippable":          slices.Concat(zstdFrame(t, nil), skippable(10), framed(200_000), skippable(0), zstdFrame(t, nil), skippable(60_000)),
		"pzstd":              slices.Concat(skippable(4), framed(300_000), skippable(70_000), zstdFrame(t, nil), make([]byte, 5000)),
		"fast":               framed(100_000, zstd.WithEncoderLevel(zstd.SpeedFastest)),
	} {
		for _, size := range []int{256 << 10, 100} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				tar, kind, points, err := readPoints(t, bytes.NewReader(blob), size, testSpan)
				if err != nil || kind != blobindex.Zstd || !bytes.Equal(tar, data) {
					t.Fatal(kind, err)
				}
				if len(points) < len(data)/400_000 {
					t.Errorf("%d points", len(points))
				}
				checkPoints(t, blob, tar, kind, points)
			})
		}
	}
}

func TestPointsOfPlainTar(t *testing.T) {
	data := mixed(1 << 20)
	tar, kind, points, err := readPoints(t, iotest.HalfReader(bytes.NewReader(data)), 4096, testSpan)
	if err != nil || kind != blobindex.None || !bytes.Equal(tar, data) || len(points) < 10 {
		t.Fatal(kind, len(points), err)
	}
	checkPoints(t, data, tar, kind, points)
}

// TestLongSpanHasNoIndex checks that a blob without places to begin gets no points.
func TestLongSpanHasNoIndex(t *testing.T) {
	data := make([]byte, blobindex.MaxSpan+1)
	for name, blob := range map[string][]byte{
		"one frame":         zstdFrame(t, data),
		"a frame after one": append(zstdFrame(t, data[:1000]), zstdFrame(t, data)...),
		"one frame, more":   append(zstdFrame(t, data), zstdFrame(t, data[:1000])...),
	} {
		if _, _, _, err := readPoints(t, bytes.NewReader(blob), 256<<10, testSpan); err == nil {
			t.Errorf("%s: it has points", name)
		}
	}
}

// TestDroppedPoints checks that dropped points are not kept.
func TestDroppedPoints(t *testing.T) {
	var out bytes.Buffer
	recorder := blobindex.NewRecorder(&out, testSpan)
	r, err := NewReader(bytes.NewReader(mixed(1<<20)), MaxWindow, recorder)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	recorder.Drop()
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(err)
	}
	if err := r.EndPoints(); err == nil {
		t.Fatal("the points are kept")
	}
}

// TestDamagedSpan checks that damage is an error or other bytes, and never a crash of the fallback.
func TestDamagedSpan(t *testing.T) {
	needISAL(t)
	data := mixed(1 << 20)
	blob := gzipped(t, data)
	_, kind, points, err := readPoints(t, bytes.NewReader(blob), 256<<10, testSpan)
	if err != nil {
		t.Fatal(err)
	}
	p := &points[1]
	out := make([]byte, points[2].Out-p.Out)
	corrupt := new(CorruptError)
	if err := Span(kind, p, blob[p.In:p.In+100], out, MaxWindow); !errors.As(err, &corrupt) {
		t.Errorf("truncated: %v", err)
	}
	wrong := *p
	wrong.Bits = (wrong.Bits + 3) % 8
	if err := Span(kind, &wrong, blob[p.In:], out, MaxWindow); err == nil && bytes.Equal(out, data[p.Out:points[2].Out]) {
		t.Error("other bits give the same bytes")
	}
	if err := Span(9, p, blob[p.In:], out, MaxWindow); !errors.As(err, &corrupt) {
		t.Errorf("unknown compression: %v", err)
	}
}

// FuzzPoints decompresses arbitrary gzips from each of their points.
func FuzzPoints(f *testing.F) {
	needISAL(f)
	for _, blob := range gzips(f, mixed(60_000)) {
		f.Add(blob, uint16(10_000), uint16(20_000), uint16(5000))
	}
	f.Add(flushed(f, mixed(5000), 100), uint16(1), uint16(1), uint16(1))
	f.Fuzz(func(t *testing.T, blob []byte, readSize, span, chunk uint16) {
		if !begins(blob, gzipMagic) {
			return
		}
		var recorded bytes.Buffer
		r, err := NewReader(chunked{bytes.NewReader(blob), 1 + int(chunk)}, MaxWindow, blobindex.NewRecorder(&recorded, 1+int64(span)))
		if err != nil {
			return
		}
		defer r.Close()
		var tar []byte
		buf := make([]byte, 1+int(readSize))
		for err == nil && len(tar) < 512<<10 {
			var n int
			n, err = r.Read(buf)
			tar = append(tar, buf[:n]...)
		}
		want, wantErr := readByGo(blob)
		if n := min(len(tar), len(want)); !bytes.Equal(tar[:n], want[:n]) || err == io.EOF && (wantErr != nil || len(want) != len(tar)) {
			t.Fatalf("%d bytes, %v; Go: %d bytes, %v", len(tar), err, len(want), wantErr)
		}
		if err != io.EOF || r.EndPoints() != nil {
			return
		}
		kind, points, err := blobindex.DecodeRecorded(recorded.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		checkPoints(t, blob, tar, kind, points)
	})
}

func readByGo(blob []byte) ([]byte, error) {
	r, err := gunzipByGo(bufio.NewReader(bytes.NewReader(blob)))
	if err != nil {
		return nil, err
	}
	out, err := io.ReadAll(io.LimitReader(r, 1<<20))
	return out, err
}
