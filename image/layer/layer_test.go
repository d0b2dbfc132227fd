package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.MainInMountNamespace(m)) }

func discardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }

// openStore opens a store in dir, which closes with the test.
func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(dir, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, s.Close()) })
	return s
}

// header is an entry of a test's tar: a tar.Header with defaults, and content.
type header struct {
	tar.Header
	content string
}

var testTime = time.Unix(1_600_000_000, 0)

func file(name, content string) header {
	return header{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: testTime}, content}
}

func dir(name string, mode int64) header {
	return header{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode, ModTime: testTime}}
}

func symlink(name, target string) header {
	return header{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: testTime}}
}

func hardlink(name, target string) header {
	return header{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644, ModTime: testTime}}
}

func device(typ byte, name string, major, minor int64) header {
	return header{Header: tar.Header{Typeflag: typ, Name: name, Mode: 0o600, Devmajor: major, Devminor: minor, ModTime: testTime}}
}

func (h header) owned(uid, gid int) header { h.Uid, h.Gid = uid, gid; return h }

func (h header) xattr(name, value string) header {
	records := map[string]string{unpack.XattrRecord + name: value}
	for k, v := range h.PAXRecords {
		records[k] = v
	}
	h.PAXRecords = records
	return h
}

// makeTar returns the tar of the entries.
func makeTar(t testing.TB, entries ...header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		testutil.Must(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.content)
		testutil.Must(t, err)
	}
	testutil.Must(t, w.Close())
	return buf.Bytes()
}

// create puts a layer into the store.
func create(t testing.TB, s *Store, data []byte) digest.Digest {
	t.Helper()
	id := digest.FromBytes(data)
	testutil.Must(t, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
	checkSum(t, s, id)
	checkTar(t, s, id, data)
	return id
}

// checkTar restores the tar of a layer, whole and in ranges.
func checkTar(t testing.TB, s *Store, id digest.Digest, data []byte) {
	t.Helper()
	info, err := s.Info(id)
	testutil.Must(t, err)
	restored, err := s.OpenTar(id)
	if errors.Is(err, ErrNoTar) && s.Kind() == rootfs.Directory && info.Record == 0 {
		return // entries of the tar replace each other, see TestTarOfReplacedFiles
	}
	testutil.Must(t, err)
	defer func() { testutil.Must(t, restored.Close()) }()
	whole, err := io.ReadAll(restored.Whole(context.Background()))
	if testutil.Must(t, err); !bytes.Equal(whole, data) {
		t.Errorf("%s: the restored tar differs", s.Kind())
	}
	r := rand.New(rand.NewPCG(1, uint64(len(data))))
	for range 8 {
		from, most := r.IntN(len(data)+1), r.IntN(1<<r.IntN(20)+1)
		part := make([]byte, most)
		n, err := restored.ReadAt(part, int64(from))
		if want := data[from:min(from+most, len(data))]; !bytes.Equal(part[:n], want) || (err == nil) != (n == most) {
			t.Errorf("%s: %d bytes from %d: %d bytes, %v", s.Kind(), most, from, n, err)
		}
	}
}

// checkSum compares the sum that was computed while the layer was created with that of its tree.
func checkSum(t testing.TB, s *Store, id digest.Digest) {
	t.Helper()
	info, err := s.Info(id)
	testutil.Must(t, err)
	now, err := Stored{Dir: s.layerDir(id), Kind: info.Kind}.SumNow(context.Background())
	testutil.Must(t, err)
	if now != info.Sum || now.IsZero() {
		t.Errorf("the sum of the tree is %s, that of the layer %s", now, info.Sum)
	}
}

// mounted mounts the stack of layers, writable, and returns the path.
func mounted(t testing.TB, s *Store, ids ...digest.Digest) string {
	t.Helper()
	layers, err := s.Stack(context.Background(), ids)
	testutil.Must(t, err)
	dir := t.TempDir()
	spec := rootfs.Spec{Layers: layers, Upper: dir + "/upper", Work: dir + "/work"}
	testutil.Must(t, spec.MakeUpper())
	testutil.Must(t, os.Mkdir(dir+"/root", 0o700))
	testutil.Must(t, spec.MountAt(dir+"/root"))
	t.Cleanup(func() { testutil.Must(t, unmount(dir+"/root")) })
	return dir + "/root"
}

func chainOf(ids ...digest.Digest) []digest.Digest { return ids }

// createMalicious puts a layer into the store that may be refused.
func createMalicious(t testing.TB, s *Store, data []byte) digest.Digest {
	t.Helper()
	id := digest.FromBytes(data)
	err := s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{})
	if err == nil {
		checkSum(t, s, id)
		return id
	}
	if errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("%v", err)
	}
	return ""
}
