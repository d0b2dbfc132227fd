package inflate

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/zstd"

	"berth/image/blobindex"
)

// inflate reads a blob's tar.
func inflate(blob io.Reader) ([]byte, error) {
	r, err := NewReader(blob, MaxWindow, nil)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

func TestInflate(t *testing.T) {
	content := strings.Repeat("content ", 100_000)
	want := []byte(content)
	for name, blob := range map[string][]byte{
		"gzip":          gzipped(t, []byte(content)),
		"zstd":          zstdFrame(t, []byte(content)),
		"zstd, frames":  append(zstdFrame(t, want[:1000]), zstdFrame(t, want[1000:])...),
		"plain":         want,
		"gzip, padded":  append(gzipped(t, want), make([]byte, 700)...),
		"gzip, one NUL": append(gzipped(t, want), 0),
		"gzip, blocks":  append(gzipped(t, want), make([]byte, 1<<20)...),
		"zstd, padded":  append(zstdFrame(t, want), make([]byte, 10240)...),
		"zstd, pzstd":   slices.Concat(skippable(4), zstdFrame(t, want[:1000]), skippable(4), zstdFrame(t, want[1000:])),
		"zstd, long skippable": slices.Concat(skippable(1<<20), skippable(0), zstdFrame(t, want[:1000]), skippable(300_000),
			zstdFrame(t, want[1000:]), skippable(9), make([]byte, 100)),
		"gzip, members": append(gzipped(t, []byte(content)), gzipped(t, []byte("more "+content))...),
	} {
		for kind, reader := range map[string]func(io.Reader) io.Reader{
			"":                func(r io.Reader) io.Reader { return r },
			", byte by byte":  iotest.OneByteReader,
			", EOF with data": iotest.DataErrReader,
		} {
			got, err := inflate(reader(bytes.NewReader(blob)))
			expected := want
			if name == "gzip, members" {
				expected = append(bytes.Clone(want), []byte("more "+content)...)
			}
			if err != nil || !bytes.Equal(got, expected) {
				t.Errorf("%s%s: %d bytes, want %d: %v", name, kind, len(got), len(expected), err)
			}
		}
	}
	for _, small := range []string{"", "a", "\x1f", "\x28\xb5\x2f"} {
		if got, err := inflate(strings.NewReader(small)); err != nil || string(got) != small {
			t.Errorf("%q: %q, %v", small, got, err)
		}
	}
}

// Headers may have a comment, a name and more in them.
func TestInflateGzipHeader(t *testing.T) {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Header = gzip.Header{Comment: "comment", Name: "name", Extra: bytes.Repeat([]byte("extra"), 1000)}
	_, err := w.Write([]byte("content"))
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	for kind, r := range map[string]io.Reader{"whole": bytes.NewReader(b.Bytes()), "byte by byte": iotest.OneByteReader(bytes.NewReader(b.Bytes()))} {
		if got, err := inflate(r); err != nil || string(got) != "content" {
			t.Errorf("%s: %q, %v", kind, got, err)
		}
	}
}

// TestInflateDividedHeader ends the input at each byte of the headers of two members that use all
// fields.
func TestInflateDividedHeader(t *testing.T) {
	const fhcrc, fextra, fname, fcomment = 1 << 1, 1 << 2, 1 << 3, 1 << 4
	header := []byte{0x1f, 0x8b, 8, fhcrc | fextra | fname | fcomment, 0, 0, 0, 0, 0, 255}
	header = append(header, 5, 0)
	header = append(header, "extraname\x00comment\x00"...)
	header = binary.LittleEndian.AppendUint16(header, uint16(crc32.ChecksumIEEE(header)))
	member := append(header, gzipped(t, []byte("content"))[10:]...) // without a header that has nothing in it
	blob := slices.Concat(member, member)
	for at := range blob {
		r := io.MultiReader(bytes.NewReader(blob[:at]), bytes.NewReader(blob[at:]))
		if got, err := inflate(r); err != nil || string(got) != "contentcontent" {
			t.Errorf("in two parts, the first of %d bytes: %q, %v", at, got, err)
		}
	}
	bad := bytes.Clone(blob)
	bad[len(header)-1] ^= 1
	if got, err := inflate(iotest.OneByteReader(bytes.NewReader(bad))); err == nil {
		t.Errorf("a header with a wrong checksum: %q", got)
	}
}

func gzipped(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zstdFrame(t testing.TB, data []byte, opts ...zstd.EOption) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

// TestInflateKeepsTheBlobsError: a network error keeps its code, wherever in the blob it occurs.
// The decompressor's own error does not hide it.
func TestInflateKeepsTheBlobsError(t *testing.T) {
	broken := errors.New("broken")
	content := strings.Repeat("content ", 100_000)
	for name, blob := range map[string][]byte{
		"gzip": gzipped(t, []byte(content)), "zstd": zstdFrame(t, []byte(content)), "plain": []byte(content),
	} {
		for _, at := range []int{0, 2, 3, len(blob) / 2, len(blob) - 1, len(blob)} {
			_, err := inflate(io.MultiReader(bytes.NewReader(blob[:at]), iotest.ErrReader(broken)))
			if err != broken {
				t.Errorf("%s, failing at %d of %d: %v", name, at, len(blob), err)
			}
		}
	}
}

// Compressions that berth does not read are named.
func TestUnsupportedCompression(t *testing.T) {
	for name, head := range map[string]string{
		"xz": "\xfd7zXZ\x00\x00\x04\xe6\xd6", "lz4": "\x04\x22\x4d\x18\x64\x40\xa7\x00\x00\x00", "zip": "PK\x03\x04\x14\x00\x00\x00\x08\x00",
		"bzip2": "BZh91AY&SY\x00", "compress": "\x1f\x9d\x90",
	} {
		_, err := inflate(strings.NewReader(head + strings.Repeat("x", 1000)))
		if unsupported := new(UnsupportedError); !errors.As(err, &unsupported) || !strings.Contains(err.Error(), name+",") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := inflate(bytes.NewReader([]byte("BZh9\x17\x72\x45\x38\x50\x90\x00\x00\x00\x00"))); err == nil {
		t.Error("an empty bzip2 is read")
	}
	for _, plain := range []string{"BZhang/notes", "BZh", "PK", "zip", "P*M\x17", "Q*M", "lz4/"} {
		if kind, err := Detect([]byte((plain + strings.Repeat("\x00", HeadSize))[:HeadSize])); kind != blobindex.None || err != nil {
			t.Errorf("%q: %v, %v", plain, kind, err)
		}
	}
}

func TestInflateRefuses(t *testing.T) {
	content := strings.Repeat("content ", 100_000)
	flip := func(b []byte, at int) []byte { b[at] ^= 0xff; return b }
	gz, zs := gzipped(t, []byte(content)), zstdFrame(t, []byte(content))
	for name, blob := range map[string][]byte{
		"gzip, cut":             gz[:len(gz)/2],
		"gzip, bad checksum":    flip(bytes.Clone(gz), len(gz)-5),
		"gzip, bad header":      flip(bytes.Clone(gz), 2),
		"gzip, bad length":      flip(bytes.Clone(gz), len(gz)-1),
		"gzip, header behind":   append(bytes.Clone(gz), 0x1f, 0x8b, 8, 0),
		"gzip, member padded":   slices.Concat(gz, make([]byte, 512), gz),
		"zstd, frame padded":    slices.Concat(zs, make([]byte, 512), zs),
		"gzip, zeros, text":     slices.Concat(gz, make([]byte, 512), []byte("x")),
		"zstd, zeros, text":     slices.Concat(zs, make([]byte, 512), []byte("x")),
		"gzip, no member":       {0x1f, 0x8b},
		"gzip, bad method":      {0x1f, 0x8b, 7, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"gzip, far repetition":  {0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0, 0x63, 0x00, 0x06, 0x00, 0, 0, 0, 0, 0, 0, 0, 0},
		"gzip, garbage behind":  append(bytes.Clone(gz), "garbage, garbage"...),
		"zstd, cut":             zs[:len(zs)/2],
		"zstd, garbage behind":  append(bytes.Clone(zs), "garbage, garbage"...),
		"zstd, window of 2 GiB": {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00},
	} {
		got, err := inflate(bytes.NewReader(blob))
		if corrupt := new(CorruptError); !errors.As(err, &corrupt) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}
