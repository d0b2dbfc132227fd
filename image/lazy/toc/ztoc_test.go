package toc_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/blobindex"
	"berth/image/lazy/toc"
	"berth/image/lazy/toc/toctest"
	"berth/internal/testutil"
)

// SOCI's tables that berth cannot use are refused, as other tables are (TestUnusableTables).
func TestUnusableZtocs(t *testing.T) {
	t.Parallel()
	for name, lie := range map[string]func(*toctest.Ztoc){
		"version":                  func(z *toctest.Ztoc) { z.Version = "1.0" },
		"not compressed":           func(z *toctest.Ztoc) { z.Kind = 2 },
		"another blob":             func(z *toctest.Ztoc) { z.BlobSize++ },
		"no tar":                   func(z *toctest.Ztoc) { z.TarSize = 0 },
		"huge tar":                 func(z *toctest.Ztoc) { z.TarSize = 1 << 50 },
		"tar too short":            func(z *toctest.Ztoc) { z.TarSize = 60_000 },
		"no points":                func(z *toctest.Ztoc) { z.Points = nil },
		"a point too few":          func(z *toctest.Ztoc) { z.Points = z.Points[:1] },
		"a digest too few":         func(z *toctest.Ztoc) { z.Sums = z.Sums[1:] },
		"other digest":             func(z *toctest.Ztoc) { z.Sums[1] = "sha512:00" },
		"point before the other":   func(z *toctest.Ztoc) { z.Points[1].In = 10 },
		"same place in the tar":    func(z *toctest.Ztoc) { z.Points[1].Out = 0 },
		"point before the blob":    func(z *toctest.Ztoc) { z.Points[0].In = -1 },
		"point at the blob's end":  func(z *toctest.Ztoc) { z.Points[1].In = z.BlobSize },
		"first point not at zero":  func(z *toctest.Ztoc) { z.Points[0].Out = 5 },
		"point outside of the tar": func(z *toctest.Ztoc) { z.Points[1].Out = 1 << 40 },
		"too many bits":            func(z *toctest.Ztoc) { z.Points[1].Bits = 8 },
		"sparse file":              func(z *toctest.Ztoc) { z.Records = map[string]string{"GNU.sparse.major": "1"} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, err := toctest.Soci(sampleTar(t), toctest.Options{ChunkSize: 50_000, LieZtoc: lie})
			testutil.Must(t, err)
			if _, err := read(b); !errors.Is(err, toc.ErrMalformed) {
				t.Error(err)
			}
		})
	}
}

// SOCI 0.16.1 has made the table in testdata, with points that are 50,000 bytes apart
// (ztoc.NewBuilder, BuildZtoc, Marshal). It is compressed here.
func TestZtocOfSOCI(t *testing.T) {
	t.Parallel()
	b := &toctest.Blob{Tar: gunzip(t, "testdata/soci.tar.gz"), Ztoc: gunzip(t, "testdata/soci.ztoc.gz")}
	var err error
	b.Bytes, err = os.ReadFile("testdata/soci.tar.gz")
	testutil.Must(t, err)
	b.DiffID = digest.FromBytes(b.Tar)
	checkTable(t, b)
	table, err := read(b)
	testutil.Must(t, err)
	x := table.Index(digest.FromBytes(b.Bytes), b.DiffID)
	inside := func(p blobindex.Point) bool { return p.Bits > 0 && len(p.Window) > 0 }
	if x.Points[1].In <= 10 || !slices.ContainsFunc(x.Points, inside) {
		t.Error("the table lacks a named header, or a point inside of a byte")
	}
}

func gunzip(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	testutil.Must(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	testutil.Must(t, err)
	b, err := io.ReadAll(z)
	testutil.Must(t, err)
	return b
}

// The first point of older tables is left out.
func TestZtocOfOlderVersion(t *testing.T) {
	t.Parallel()
	b, err := toctest.Soci(sampleTar(t), toctest.Options{ChunkSize: 20_000, LieZtoc: func(z *toctest.Ztoc) { z.Old = true }})
	testutil.Must(t, err)
	table, err := read(b)
	testutil.Must(t, err)
	_, want := packed(t, bytes.NewReader(b.Tar), false)
	if got := filled(t, table.Index(digest.FromBytes(b.Bytes), b.DiffID), b.Bytes); !bytes.Equal(got, want) {
		t.Error("the data is wrong")
	}
}

// The digest in the SOCI index must be that of the table.
func TestZtocHasTheDigestOfTheIndex(t *testing.T) {
	t.Parallel()
	b, err := toctest.Soci(sampleTar(t), toctest.Options{})
	testutil.Must(t, err)
	ref, _ := b.Ref()
	other := append(slices.Clone(b.Ztoc), 0)
	_, err = toc.Read(t.Context(), ref, toc.From{Ztoc: func(context.Context) ([]byte, error) { return other, nil }})
	if !errors.Is(err, toc.ErrMalformed) {
		t.Error(err)
	}
}

func TestOfZtoc(t *testing.T) {
	t.Parallel()
	sum := digest.FromString("x")
	blob, ztoc := ocispec.Descriptor{Digest: sum, Size: 1000}, ocispec.Descriptor{Digest: sum, Size: 100}
	if ref, ok := toc.OfZtoc(blob, ztoc); !ok || ref.String() != "soci "+sum.String() {
		t.Errorf("%s, %v", ref, ok)
	}
	for name, change := range map[string]func(*ocispec.Descriptor){
		"empty": func(d *ocispec.Descriptor) { d.Size = 0 }, "large": func(d *ocispec.Descriptor) { d.Size = 1 << 41 },
		"SHA-512": func(d *ocispec.Descriptor) { d.Digest = digest.SHA512.FromString("") }, "no digest": func(d *ocispec.Descriptor) { d.Digest = "x" },
	} {
		wrong := blob
		change(&wrong)
		if _, ok := toc.OfZtoc(wrong, ztoc); ok {
			t.Errorf("blob: %s", name)
		}
		wrong = ztoc
		change(&wrong)
		if _, ok := toc.OfZtoc(blob, wrong); ok {
			t.Errorf("table: %s", name)
		}
	}
}

// Bytes other than those of the blob are found before anything decompresses them.
func TestSealsOfZtoc(t *testing.T) {
	t.Parallel()
	b, err := toctest.Soci(sampleTar(t), toctest.Options{ChunkSize: 20_000})
	testutil.Must(t, err)
	table, err := read(b)
	testutil.Must(t, err)
	x := table.Index(digest.FromBytes(b.Bytes), b.DiffID)
	for i := 1; i < x.Spans(); i++ {
		offset, size := x.GridRange(i, i)
		raw := slices.Clone(b.Bytes[offset:][:size])
		raw[len(raw)-1]++
		if _, _, err := x.Opened(i, raw); !errors.Is(err, blobindex.ErrMismatch) {
			t.Errorf("span %d: %v", i, err)
		}
	}
}

// fuzzPoint and fuzzFile are the numbers of a point and of an entry.
type fuzzPoint struct {
	In, Out int64
	Bits    byte
}

type fuzzFile struct {
	Type                   byte
	Offset, Size, Mode     int64
	UID, GID, Major, Minor int32
}

// fuzzTypes are the types of entries.
var fuzzTypes = []string{"reg", "dir", "symlink", "hardlink", "char", "block", "fifo", "chunk", "other"}

// Each point takes 32 KiB of a table, which slows the fuzzer down.
const maxFuzzPoints, maxFuzzFiles = 3, 12

// unpackNumbers decodes structs of numbers, at most a number of them.
func unpackNumbers[T any](t testing.TB, b []byte, most int) []T {
	t.Helper()
	list := make([]T, min(len(b)/binary.Size(*new(T)), most))
	testutil.Must(t, binary.Read(bytes.NewReader(b), binary.LittleEndian, list))
	return list
}

func packNumbers(t testing.TB, list any) []byte {
	t.Helper()
	b, err := binary.Append(nil, binary.LittleEndian, list)
	testutil.Must(t, err)
	return b
}

// fuzzedZtoc are the arguments of FuzzZtoc.
type fuzzedZtoc struct {
	version           string
	kind              byte
	blobSize, tarSize int64
	old               bool
	points, files     []byte // of fuzzPoint and fuzzFile
	texts             string // lines: name, target and an extended attribute of each file
	sums              string // lines
}

// fuzzedOf returns the arguments for a table.
func fuzzedOf(t testing.TB, z *toctest.Ztoc) fuzzedZtoc {
	t.Helper()
	var points []fuzzPoint
	for _, p := range z.Points {
		points = append(points, fuzzPoint{p.In, p.Out, p.Bits})
	}
	var files []fuzzFile
	var texts []string
	for _, e := range z.Files[:min(len(z.Files), maxFuzzFiles)] {
		files = append(files, fuzzFile{byte(slices.Index(fuzzTypes, e.Type)), e.Offset, e.Size, e.Mode, int32(e.UID), int32(e.GID), int32(e.DevMajor), int32(e.DevMinor)})
		texts = append(texts, e.Name, e.LinkName, "user.a")
	}
	return fuzzedZtoc{z.Version, z.Kind, z.BlobSize, z.TarSize, z.Old, packNumbers(t, points), packNumbers(t, files),
		strings.Join(texts, "\n"), strings.Join(z.Sums, "\n")}
}

// encode returns the table.
func (a fuzzedZtoc) encode(t testing.TB) []byte {
	t.Helper()
	z := toctest.Ztoc{Version: a.version, Kind: a.kind, BlobSize: a.blobSize, TarSize: a.tarSize, Old: a.old, Sums: strings.Split(a.sums, "\n")}
	for _, p := range unpackNumbers[fuzzPoint](t, a.points, maxFuzzPoints) {
		z.Points = append(z.Points, toctest.ZtocPoint{In: p.In, Out: p.Out, Bits: p.Bits})
	}
	texts := strings.Split(a.texts, "\n")
	text := func() (first string) {
		if len(texts) > 0 {
			first, texts = texts[0], texts[1:]
		}
		return first
	}
	for _, n := range unpackNumbers[fuzzFile](t, a.files, maxFuzzFiles) {
		e := &estargz.TOCEntry{Type: fuzzTypes[int(n.Type)%len(fuzzTypes)], Offset: n.Offset, Size: n.Size, Mode: n.Mode, UID: int(n.UID), GID: int(n.GID),
			DevMajor: int(n.Major), DevMinor: int(n.Minor), Name: text(), LinkName: text(), ModTime3339: "2024-01-02T03:04:05.6Z"}
		e.Xattrs = map[string][]byte{text(): []byte("value")}
		z.Files = append(z.Files, e)
	}
	return z.Encode()
}

// readFuzzed reads a table of a blob.
func readFuzzed(t testing.TB, text []byte, blobSize int64) (*toc.Table, digest.Digest, error) {
	t.Helper()
	sum := digest.FromBytes(text)
	ref, ok := toc.OfZtoc(ocispec.Descriptor{Digest: sum, Size: blobSize}, ocispec.Descriptor{Digest: sum, Size: int64(len(text))})
	if !ok {
		return nil, sum, toc.ErrMalformed
	}
	table, err := toc.Read(t.Context(), ref, toc.From{Ztoc: func(context.Context) ([]byte, error) { return text, nil }})
	return table, sum, err
}

// Whatever a table of SOCI says, it is refused or gives a consistent index and outline. The fuzzer
// changes the fields of a table, because most changes of its bytes only break the flatbuffer. at
// and flip change a byte of it.
func FuzzZtoc(f *testing.F) {
	for _, chunk := range []int{0, 60_000} {
		for _, old := range []bool{false, true} {
			var seed fuzzedZtoc
			_, err := toctest.Soci(sampleTar(f), toctest.Options{ChunkSize: chunk, LieZtoc: func(z *toctest.Ztoc) { z.Old = old; seed = fuzzedOf(f, z) }})
			testutil.Must(f, err)
			table, _, err := readFuzzed(f, seed.encode(f), seed.blobSize)
			testutil.Must(f, err) // a seed reaches everything
			_, err = io.Copy(io.Discard, table.Outline())
			testutil.Must(f, err)
			f.Add(seed.version, seed.kind, seed.blobSize, seed.tarSize, seed.old, seed.points, seed.files, seed.texts, seed.sums, uint(0), byte(0))
		}
	}
	f.Fuzz(func(t *testing.T, version string, kind byte, blobSize, tarSize int64, old bool, points, files []byte, texts, sums string, at uint, flip byte) {
		text := fuzzedZtoc{version, kind, blobSize, tarSize, old, points, files, texts, sums}.encode(t)
		text[at%uint(len(text))] ^= flip
		table, sum, err := readFuzzed(t, text, blobSize)
		checkFuzzed(t, table, err, sum)
	})
}
