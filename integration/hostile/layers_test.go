package hostile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/internal/testutil"
)

// packed returns a tar of entries. Entries may contain fields that fixture.Tree does not support,
// such as sizes and PAX records.
func packed(t *testing.T, entries ...fixture.Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.Body))
		harness.Must(t, w.WriteHeader(&e.Header))
		_, err := w.Write(e.Body)
		harness.Must(t, err)
	}
	harness.Must(t, w.Close())
	return b.Bytes()
}

func plain(data []byte) registrytest.Layer { return registrytest.Layer{Blob: data} }

// gzipped compresses a stream, because some layers do not fit into memory.
func gzipped(t *testing.T, plain io.Reader) registrytest.Layer {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	sum := digest.SHA256.Digester()
	_, err := io.Copy(io.MultiWriter(z, sum.Hash()), plain)
	harness.Must(t, err)
	harness.Must(t, z.Close())
	return registrytest.Layer{Blob: b.Bytes(), MediaType: ocispec.MediaTypeImageLayerGzip, DiffID: sum.Digest()}
}

func zstandard(t *testing.T, plain io.Reader) registrytest.Layer {
	t.Helper()
	var b bytes.Buffer
	z := harness.Get(zstd.NewWriter(&b))(t)
	sum := digest.SHA256.Digester()
	_, err := io.Copy(io.MultiWriter(z, sum.Hash()), plain)
	harness.Must(t, err)
	harness.Must(t, z.Close())
	return registrytest.Layer{Blob: b.Bytes(), MediaType: ocispec.MediaTypeImageLayerZstd, DiffID: sum.Digest()}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// letters is text that compresses as well as zeros, and takes space on disk.
type letters struct{}

func (letters) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = 'x'
	}
	return len(b), nil
}

// bigFile returns a tar of one file, which begins with content.
func bigFile(t *testing.T, content io.Reader, size int64) io.Reader {
	t.Helper()
	var b bytes.Buffer
	harness.Must(t, tar.NewWriter(&b).WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: size, Typeflag: tar.TypeReg}))
	return io.MultiReader(&b, io.LimitReader(content, size), io.LimitReader(zeros{}, 1024))
}

// sparse returns a tar of a file of the given size without data.
func sparse(t *testing.T, size int64) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hole")
	harness.Must(t, os.WriteFile(path, nil, 0o644))
	harness.Must(t, os.Truncate(path, size))
	out := harness.Get(exec.Command("tar", "-C", filepath.Dir(path), "--format=pax", "--sparse", "-c", "hole").Output())(t)
	return out
}

// patched returns a tar of one empty file, with bytes of its header replaced and the checksum
// corrected.
func patched(t *testing.T, at int, with string) []byte {
	t.Helper()
	data := packed(t, fixture.File("f", 0o644, ""))
	copy(data[at:], with)
	copy(data[148:156], "        ")
	sum := 0
	for _, c := range data[:512] {
		sum += int(c)
	}
	copy(data[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return data
}

func repeated(n int, entry func(i int) fixture.Entry) []fixture.Entry {
	list := make([]fixture.Entry, 0, n)
	for i := range n {
		list = append(list, entry(i))
	}
	return list
}

// The daemon refuses these layers.
func TestLayers(t *testing.T) {
	d := startDaemon(t, "image.max_layer_entries = 5000", "image.max_layer_bytes = 268435456")
	good := packed(t, fixture.Dir("d", 0o755), fixture.File("d/f", 0o644, strings.Repeat("content", 1000)))
	inGzip := gzipped(t, bytes.NewReader(good))
	otherID := func(l registrytest.Layer) registrytest.Layer { l.DiffID = digest.FromString("other"); return l }
	garbled := bytes.Clone(inGzip.Blob)
	garbled[len(garbled)-6] ^= 0xff // corrupts the checksum
	deep := strings.Repeat("d/", 2100)
	for _, c := range []struct {
		name  string
		layer registrytest.Layer
		code  codes.Code
		text  string
	}{
		{"zstd bomb of 512 MiB", zstandard(t, bigFile(t, zeros{}, 512<<20)), codes.FailedPrecondition, "bytes allowed"},
		{"gzip in gzip in gzip", gzipped(t, bytes.NewReader(gzipped(t, bytes.NewReader(inGzip.Blob)).Blob)), codes.InvalidArgument, "read tar after 0 entries"},
		{"gzip that inflates to itself", registrytest.Layer{Blob: quine(t), MediaType: ocispec.MediaTypeImageLayerGzip}, codes.InvalidArgument, "read tar after 0 entries"},
		{"20,000 extended attributes of a file", plain(packed(t, withXattrs("f", 20_000))), codes.InvalidArgument, "more than the 65536 that Linux lists"},
		{"zstd window of 2 GiB", plain([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00}), codes.DataLoss, "decompress"},
		{"truncated gzip", plain(inGzip.Blob[:len(inGzip.Blob)/2]), codes.DataLoss, "decompress"},
		{"corrupt gzip", plain(garbled), codes.DataLoss, "decompress"},
		{"wrong diffID", otherID(inGzip), codes.DataLoss, "has the digest"},
		{"truncated tar", plain(good[:1024+100]), codes.InvalidArgument, "unexpected EOF"},
		{"not a tar", plain(bytes.Repeat([]byte("no tar "), 1000)), codes.InvalidArgument, "invalid tar header"},
		{"more files than allowed", gzipped(t, bytes.NewReader(packed(t, repeated(5001, func(i int) fixture.Entry { return fixture.File(fmt.Sprint("f", i), 0o644, "") })...))), codes.FailedPrecondition, "more than the 5000 entries"},
		{"the same file 5001 times", gzipped(t, bytes.NewReader(packed(t, repeated(5001, func(int) fixture.Entry { return fixture.File("f", 0o644, "") })...))), codes.FailedPrecondition, "more than the 5000 entries"},
		{"sparse file of 1 TiB", plain(sparse(t, 1<<40)), codes.FailedPrecondition, "its files are larger"},
		{"file of negative size", plain(patched(t, 124, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")), codes.InvalidArgument, "invalid tar header"},
		{"file of 2^63 bytes", plain(patched(t, 124, "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff")), codes.FailedPrecondition, "its files are larger"},
		{"unknown type", plain(patched(t, 156, "V")), codes.InvalidArgument, "unknown type"},
		{"PAX record of 2 MiB", plain(packedPAX(t, 2<<20)), codes.InvalidArgument, "header field too long"},
		{"PAX record with a NUL byte", plain(paxPath(t, "a\x00b")), codes.InvalidArgument, "invalid tar header"},
		{"path that is too long", plain(packed(t, fixture.File(deep+"f", 0o644, ""))), codes.InvalidArgument, "file name too long"},
		{"name that is too long", plain(packed(t, fixture.File(strings.Repeat("x", 256), 0o644, ""))), codes.InvalidArgument, "file name too long"},
		{"file below a symlink loop", plain(packed(t, fixture.Symlink("l", "m"), fixture.Symlink("m", "l"), fixture.File("l/f", 0o644, ""))), codes.InvalidArgument, "too many levels"},
		{"hard link to a missing file", plain(packed(t, fixture.Hardlink("h", "no/where"))), codes.InvalidArgument, "no such file"},
		{"hard link to the host", plain(packed(t, fixture.Hardlink("h", "../../../../../../etc/hostname"))), codes.InvalidArgument, "no such file"},
		{"hard link to a directory", plain(packed(t, fixture.Dir("d", 0o755), fixture.Hardlink("h", "d"))), codes.InvalidArgument, "directory"},
		{"owner of 33 bits", plain(packed(t, fixture.File("f", 0o644, "").Owned(1<<32, 0))), codes.InvalidArgument, "owner"},
		{"invalid device number", plain(packed(t, fixture.CharDevice("c", 0o644, 1<<12, 0))), codes.InvalidArgument, "device number"},
		{"root that is a link", plain(packed(t, fixture.Symlink("/", "/etc"))), codes.InvalidArgument, "root is no directory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, name := image(t, c.layer)
			refused(t, d, name, c.code, c.text)
		})
	}
}

// With the directory driver, berth-unpack reports the names that a layer refers to in lower layers.
// A hostile layer makes that report huge.
func TestHugeLayerReport(t *testing.T) {
	d := startDaemonWith(t, nil, harness.WithLayerDriver("directory"))
	_, name := image(t, gzipped(t, bytes.NewReader(packed(t, repeated(1500, func(i int) fixture.Entry {
		return fixture.Hardlink(fmt.Sprint("h", i), strings.Repeat("nowhere/", 490))
	})...))))
	refused(t, d, name, codes.FailedPrecondition, "names of unlisted and opaque directories")
}

// withXattrs returns a file with n extended attributes.
func withXattrs(name string, n int) fixture.Entry {
	file := fixture.File(name, 0o644, "")
	file.PAXRecords = map[string]string{}
	for i := range n {
		file.PAXRecords[fmt.Sprintf("SCHILY.xattr.user.%05d", i)] = "x"
	}
	return file
}

// packedPAX returns a tar with a PAX record of that size, which tar.Writer refuses to write.
func packedPAX(t *testing.T, size int) []byte {
	t.Helper()
	return withPAX(t, "comment", strings.Repeat("x", size))
}

func paxPath(t *testing.T, path string) []byte {
	t.Helper()
	return withPAX(t, "path", path)
}

// withPAX returns a tar of a PAX header with one record, and a file.
func withPAX(t *testing.T, key, value string) []byte {
	t.Helper()
	record := fmt.Sprintf(" %s=%s\n", key, value)
	length := len(record) + 1
	for len(fmt.Sprint(length))+len(record) != length {
		length = len(fmt.Sprint(length)) + len(record)
	}
	record = fmt.Sprint(length) + record
	data := packed(t, fixture.File("pax", 0o644, record))
	data = data[:len(data)-1024] // the end of the tar
	data[156] = tar.TypeXHeader
	copy(data[148:156], "        ")
	sum := 0
	for _, c := range data[:512] {
		sum += int(c)
	}
	copy(data[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return append(data, packed(t, fixture.File("f", 0o644, ""))...)
}

// Unusual but valid layers unpack to their content, inside the image.
func TestUnusualLayers(t *testing.T) {
	d := startDaemon(t)
	dir := t.TempDir()
	canary := filepath.Join(dir, "canary")
	harness.Must(t, os.WriteFile(canary, []byte("the host's own"), 0o600))
	var fifo fixture.Entry
	fifo.Name, fifo.Typeflag, fifo.Mode = "x", tar.TypeFifo, 0o644
	for what, entries := range map[string][]fixture.Entry{
		"paths that lead out": {
			fixture.File("../../../../../.."+canary, 0o644, "owned"), fixture.File("/"+canary, 0o644, "owned"),
			fixture.Symlink("l", dir), fixture.File("l/canary", 0o644, "owned"), fixture.File("l/.wh.canary", 0, ""),
			fixture.Symlink("p", "/proc/self/root/"+dir), fixture.File("p/canary", 0o644, "owned"),
			fixture.Symlink("fd", "/proc/self/fd/3"), fixture.File("fd/x", 0o644, "owned"),
			fixture.Symlink("cwd", "/proc/self/cwd"), fixture.File("cwd/0", 0o644, "owned"),
		},
		"the same name several times": {
			fixture.File("x", 0o644, "1"), fixture.Dir("x", 0o755), fixture.File("x/y", 0o644, "2"), fixture.Symlink("x", "/etc"), fifo,
			fixture.CharDevice("x", 0o644, 1, 3), fixture.Whiteout("", "x"), fixture.File("x", 0o644, "3"), fixture.Hardlink("x", "x"),
		},
		"unusual names":    {fixture.File("new\nline", 0o644, ""), fixture.File("\xff\xfe", 0o644, ""), fixture.File("\x1b[31m", 0o644, ""), fixture.File(`"\`, 0o644, "")},
		"2000 directories": {fixture.File(strings.Repeat("d/", 2000)+"f", 0o644, "")},
		"nothing":          {},
	} {
		t.Run(what, func(t *testing.T) {
			_, name := image(t, gzipped(t, bytes.NewReader(packed(t, entries...))))
			harness.Must(t, pull(t, d, name, nil))
			content := harness.Get(os.ReadFile(canary))(t)
			harness.Equal(t, "content of the host's file", string(content), "the host's own")
			harness.Must(t, d.Images.RemoveImage(t.Context(), imageSpec(name)))
			noTraceOf(t, d, name)
		})
	}
}

// A layer makes berth-unpack use as much memory as possible, most of it for the window of zstd.
func TestMemoryOfALayer(t *testing.T) {
	testutil.Long(t)
	d := startDaemon(t)
	var b bytes.Buffer
	z := harness.Get(zstd.NewWriter(&b, zstd.WithWindowSize(128<<20)))(t)
	sum := digest.SHA256.Digester()
	_, err := io.Copy(io.MultiWriter(z, sum.Hash()), bigFile(t, letters{}, 200<<20))
	harness.Must(t, err)
	harness.Must(t, z.Close())
	for _, l := range []registrytest.Layer{
		{Blob: b.Bytes(), MediaType: ocispec.MediaTypeImageLayerZstd, DiffID: sum.Digest()},
		gzipped(t, bigFile(t, letters{}, 200<<20)),
	} {
		_, name := image(t, l)
		harness.Must(t, pull(t, d, name, nil))
		harness.Must(t, d.Images.RemoveImage(t.Context(), imageSpec(name)))
	}
}
