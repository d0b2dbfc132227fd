package toc_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/opencontainers/go-digest"

	"berth/image/blobindex"
	"berth/image/lazy/toc"
	"berth/image/lazy/toc/toctest"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/testutil"
)

// sampleTar has all kinds of entries.
func sampleTar(t testing.TB) []byte {
	t.Helper()
	at := time.Unix(1_700_000_000, 0)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range []struct {
		tar.Header
		content string
	}{
		{tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o711, Uid: 7}, ""},
		{tar.Header{Typeflag: tar.TypeReg, Name: "d/big", Mode: 0o4755}, strings.Repeat("0123456789abcdef", 5000)},
		{tar.Header{Typeflag: tar.TypeReg, Name: "d/empty", Mode: 0o600}, ""},
		{tar.Header{Typeflag: tar.TypeReg, Name: "d/.wh.gone", Mode: 0o600}, ""},
		{tar.Header{Typeflag: tar.TypeReg, Name: "small", Mode: 0o644, Gid: 1 << 30,
			PAXRecords: map[string]string{"SCHILY.xattr.user.k": "v\x01"}}, "small"},
		{tar.Header{Typeflag: tar.TypeLink, Name: "other", Linkname: "d/big"}, ""},
		{tar.Header{Typeflag: tar.TypeSymlink, Name: "link", Linkname: "../x", Mode: 0o777}, ""},
		{tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3, Mode: 0o666}, ""},
		{tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600}, ""},
		{tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("long", 25) + "/" + strings.Repeat("long", 25) + "name", Mode: 0o644}, "last"},
	} {
		e.ModTime, e.Size = at, int64(len(e.content))
		testutil.Must(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.content)
		testutil.Must(t, err)
	}
	testutil.Must(t, w.Close())
	return b.Bytes()
}

// read reads the table of a blob.
func read(b *toctest.Blob) (*toc.Table, error) {
	ref, ok := b.Ref()
	if !ok {
		return nil, fmt.Errorf("no table: %v", b.Annotations)
	}
	return toc.Read(context.Background(), ref, toc.From{
		Ztoc: func(context.Context) ([]byte, error) { return b.Ztoc, nil },
		Fetch: func(_ context.Context, offset, size int64) ([]byte, error) {
			return slices.Clone(b.Bytes[offset:][:size]), nil
		},
		Inflate: func(_ context.Context, kind blobindex.Compression, in []byte, out int64) ([]byte, error) {
			raw := make([]byte, out)
			return raw, inflate.Span(kind, &blobindex.Point{Start: true}, in, raw, inflate.MaxWindow)
		},
	})
}

// packed unpacks a tar and returns its tree and its data file.
func packed(t *testing.T, from io.Reader, noData bool) (tree, data []byte) {
	t.Helper()
	dir := t.TempDir()
	var files [3]*os.File
	for i := range files {
		f, err := os.Create(filepath.Join(dir, fmt.Sprint(i)))
		testutil.Must(t, err)
		defer f.Close()
		files[i] = f
	}
	_, err := unpack.Pack(t.Context(), files[0], files[1], from,
		unpack.Job{Algorithm: digest.SHA256, NoData: noData, Record: files[2]})
	testutil.Must(t, err)
	data, err = os.ReadFile(files[0].Name())
	testutil.Must(t, err)
	tree, err = os.ReadFile(files[1].Name())
	testutil.Must(t, err)
	return tree, data
}

var makers = map[string]func([]byte, toctest.Options) (*toctest.Blob, error){
	"eStargz": toctest.Stargz, "zstd:chunked": toctest.Chunked, "SOCI": toctest.Soci,
}

// The tree and the data file that a table gives are those of the blob.
func TestTableGivesTheLayer(t *testing.T) {
	t.Parallel()
	for form, pack := range makers {
		for name, o := range map[string]toctest.Options{
			"usual": {}, "rewritten": {Rewrite: true}, "small chunks": {ChunkSize: 1000}, "shared members": {ChunkSize: 1000, MinChunkSize: 5000},
			"rewritten and shared": {ChunkSize: 1000, MinChunkSize: 5000, Rewrite: true},
		} {
			t.Run(form+", "+name, func(t *testing.T) {
				t.Parallel()
				b, err := pack(sampleTar(t), o)
				testutil.Must(t, err)
				if digest.FromBytes(b.Tar) != b.DiffID {
					t.Fatal("the encoder made another tar")
				}
				checkTable(t, b)
			})
		}
	}
}

// checkTable compares the tree and the data file that a table gives with those of the tar.
func checkTable(t *testing.T, b *toctest.Blob) {
	t.Helper()
	table, err := read(b)
	testutil.Must(t, err)
	x := table.Index(digest.FromBytes(b.Bytes), b.DiffID)
	wantTree, wantData := packed(t, bytes.NewReader(b.Tar), false)
	encoded, data := packed(t, table.Outline(), true)
	root, _, err := tree.Decode(bytes.NewReader(encoded), 0, tree.Limit{Bytes: 1 << 20, Memory: 1 << 20, Blocks: 1 << 20})
	testutil.Must(t, err)
	testutil.Must(t, table.Place(root, int64(len(data))))
	var placed bytes.Buffer
	testutil.Must(t, tree.Encode(&placed, root))
	if !bytes.Equal(placed.Bytes(), wantTree) {
		t.Errorf("the tree is\n%q\nwant\n%q", placed.Bytes(), wantTree)
	}
	if got := filled(t, x, b.Bytes); !bytes.Equal(got, wantData) {
		t.Errorf("the data has %d bytes, want %d; equal: %v", len(got), len(wantData), bytes.Equal(got, wantData))
	}
	x.TreeDigest, x.RecordDigest = digest.FromBytes(wantTree), digest.FromBytes(nil)
	encodedIndex, err := x.Encode()
	testutil.Must(t, err)
	decoded, err := blobindex.Decode(encodedIndex)
	testutil.Must(t, err)
	if got := filled(t, decoded, b.Bytes); !bytes.Equal(got, wantData) {
		t.Error("the decoded index gives other data")
	}
}

// filled fills a data file from the spans of a blob.
func filled(t *testing.T, x *blobindex.Index, blob []byte) []byte {
	t.Helper()
	data, spans := make([]byte, x.DataSize), int64(0)
	for i := range x.Spans() {
		s := x.Span(i)
		spans += s.InSize
		raw := blob[s.In:][:s.InSize]
		if x.Sealed() {
			offset, size := x.GridRange(i, i)
			var err error
			s.Point, raw, err = x.Opened(i, blob[offset:][:size])
			testutil.Must(t, err)
		}
		if s.OutSize == 0 {
			continue
		}
		out := make([]byte, s.OutSize)
		testutil.Must(t, inflate.Span(x.Kind, &s.Point, raw, out, inflate.MaxWindow))
		testutil.Must(t, x.VerifySpan(i, out))
		for _, c := range x.Chunks {
			if c.Out >= s.Out && c.Out < s.Out+s.OutSize {
				copy(data[c.Data:], out[c.Out-s.Out:][:c.Size])
			}
		}
	}
	if spans != int64(len(blob)) {
		t.Errorf("the spans have %d bytes of %d", spans, len(blob))
	}
	return data
}

// Tables that berth cannot use are refused.
func TestUnusableTables(t *testing.T) {
	t.Parallel()
	find := func(table *estargz.JTOC, name string) *estargz.TOCEntry {
		i := slices.IndexFunc(table.Entries, func(e *estargz.TOCEntry) bool { return e.Name == name })
		return table.Entries[i]
	}
	for name, lie := range map[string]func(*estargz.JTOC){
		"version":          func(x *estargz.JTOC) { x.Version = 2 },
		"nothing":          func(x *estargz.JTOC) { x.Entries = nil },
		"unknown type":     func(x *estargz.JTOC) { x.Entries[0].Type = "sparse" },
		"chunk first":      func(x *estargz.JTOC) { x.Entries[0].Type = "chunk" },
		"two of one name":  func(x *estargz.JTOC) { find(x, "small").Name = "d/../d/big" },
		"negative size":    func(x *estargz.JTOC) { find(x, "small").Size = -1 },
		"huge":             func(x *estargz.JTOC) { find(x, "small").Size = 1 << 60 },
		"whiteout":         func(x *estargz.JTOC) { find(x, "small").Name = ".wh.small" },
		"no digest":        func(x *estargz.JTOC) { e := find(x, "small"); e.ChunkDigest, e.Digest = "", "" },
		"other digest":     func(x *estargz.JTOC) { find(x, "small").ChunkDigest = "sha512:00" },
		"outside":          func(x *estargz.JTOC) { find(x, "small").Offset = 1 << 40 },
		"before the other": func(x *estargz.JTOC) { find(x, "small").Offset = 0 },
		"gap":              func(x *estargz.JTOC) { find(x, "d/big").ChunkOffset = 3 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for form, pack := range makers {
				if form == "SOCI" && slices.Contains([]string{"version", "no digest", "other digest", "gap"}, name) {
					continue // it has no such field
				}
				b, err := pack(sampleTar(t), toctest.Options{ChunkSize: 50_000, Lie: lie})
				testutil.Must(t, err)
				if _, err := read(b); !errors.Is(err, toc.ErrMalformed) && (err == nil || name != "nothing") {
					t.Errorf("%s: %v", form, err)
				}
			}
		})
	}
}

// The digest in the annotation must be that of the table.
func TestTableHasTheDigestOfTheManifest(t *testing.T) {
	t.Parallel()
	for form, pack := range makers {
		if form == "SOCI" {
			continue // see TestZtocHasTheDigestOfTheIndex
		}
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			b, err := pack(sampleTar(t), toctest.Options{})
			testutil.Must(t, err)
			wrong := digest.FromString("another").String()
			for _, key := range []string{toc.StargzDigest, toc.ChunkedDigest} {
				if b.Annotations[key] != "" {
					b.Annotations[key] = wrong
				}
			}
			if _, err := read(b); !errors.Is(err, toc.ErrMalformed) {
				t.Error(err)
			}
		})
	}
}

func TestFind(t *testing.T) {
	t.Parallel()
	sum := digest.FromString("table").String()
	position := func(text string) map[string]string {
		return map[string]string{toc.ChunkedDigest: sum, toc.ChunkedPosition: text}
	}
	for name, c := range map[string]struct {
		annotations map[string]string
		ok          bool
	}{
		"none":            {nil, false},
		"eStargz":         {map[string]string{toc.StargzDigest: sum}, true},
		"no digest":       {map[string]string{toc.StargzDigest: "x"}, false},
		"SHA-512":         {map[string]string{toc.StargzDigest: digest.SHA512.FromString("").String()}, false},
		"zstd:chunked":    {position("100:200:300:1"), true},
		"only a position": {map[string]string{toc.ChunkedPosition: "100:200:300:1"}, false},
		"unknown type":    {position("100:200:300:2"), false},
		"three numbers":   {position("100:200:300"), false},
		"beyond the blob": {position("900:200:300:1"), false},
		"overflow":        {position("9223372036854775807:9223372036854775807:300:1"), false},
		"negative":        {position("-1:200:300:1"), false},
		"large":           {position("100:200:99999999999:1"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := toctest.Blob{Bytes: make([]byte, 1000), Annotations: c.annotations}
			if ref, ok := toc.Find(b.Descriptor()); ok != c.ok {
				t.Errorf("%v, %v", ref, ok)
			}
		})
	}
}

// Whatever a table says, it is refused or gives an index and an outline that are consistent.
func FuzzTable(f *testing.F) {
	for _, text := range []string{
		`{"version":1,"entries":[{"name":"d","type":"dir","mode":493,"xattrs":{"user.a":"YQ=="}},{"name":"f","type":"reg","size":3,` +
			`"modtime":"2024-01-02T03:04:05.6Z","offset":9,"digest":"sha256:` + fmt.Sprintf("%x", sha256.Sum256([]byte("abc"))) + `"}]}`,
		`{"entries":[{"name":"f","type":"reg","size":3},{"name":"f","type":"chunk","chunkOffset":1}]}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		blob := append(bytes.Repeat([]byte("x"), 100), text...)
		b := toctest.Blob{Bytes: append(blob, 0), Annotations: map[string]string{
			toc.ChunkedDigest: digest.FromBytes(text).String(), toc.ChunkedPosition: fmt.Sprintf("100:%d:%d:1", len(text), len(text))}}
		ref, ok := toc.Find(b.Descriptor())
		if !ok {
			return
		}
		table, err := toc.Read(t.Context(), ref, toc.From{
			Fetch: func(_ context.Context, offset, size int64) ([]byte, error) { return b.Bytes[offset:][:size], nil },
			Inflate: func(_ context.Context, _ blobindex.Compression, in []byte, _ int64) ([]byte, error) {
				return slices.Clone(in), nil
			},
		})
		checkFuzzed(t, table, err, digest.FromBytes(b.Bytes))
	})
}

// checkFuzzed checks what Read has returned for a table of unknown content.
func checkFuzzed(t *testing.T, table *toc.Table, err error, blob digest.Digest) {
	t.Helper()
	if err != nil {
		if !errors.Is(err, toc.ErrMalformed) {
			t.Fatal(err)
		}
		return
	}
	x := table.Index(blob, digest.FromString("tar"))
	x.TreeDigest, x.RecordDigest = digest.FromString("tree"), digest.FromBytes(nil)
	if b, err := x.Encode(); err == nil {
		if _, err := blobindex.Decode(b); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.Copy(io.Discard, table.Outline()); err != nil && !errors.Is(err, toc.ErrMalformed) {
		t.Fatal(err)
	}
}
