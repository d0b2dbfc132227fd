package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// The tar is restored with large files, files of all sizes around a block, sparse files, names that
// occur twice, and bytes after its end.
func TestRestoreTar(t *testing.T) {
	w := newTwin(t)
	var entries []header
	for i, size := range []int{0, 1, 511, 512, 513, 4095, 4096, 4097, 300_000, 1 << 20} {
		entries = append(entries, file(fmt.Sprintf("usr/f%d", i), strings.Repeat("0123456789abcdef"[i:i+1], size)))
	}
	for i := range 3000 {
		entries = append(entries, file(fmt.Sprintf("etc/many/%d", i), fmt.Sprint("content ", i)).xattr("user.n", fmt.Sprint(i)))
	}
	entries = append(entries, dir("usr/share", 0o755), symlink("usr/link", "f1"), hardlink("usr/hard", "usr/f2"))
	cases := map[string][]byte{
		"plain":    makeTar(t, entries...),
		"trailing": append(makeTar(t, entries...), strings.Repeat("after the end", 40_000)...),
		"sparse":   gnuTarOf(t, func(dir string) { testutil.Must(t, os.Truncate(dir+"/file", 1<<20)) }),
		"empty":    makeTar(t),
	}
	for name, data := range cases {
		t.Run(name, func(t *testing.T) {
			id := w.create(t, data)
			for _, s := range []*Store{w.directory, w.erofs} {
				if info, err := s.Info(id); err != nil || info.Record == 0 || info.Record > int64(len(data)) {
					t.Errorf("%s: a record of %d bytes for a tar of %d, %v", s.Kind(), info.Record, len(data), err)
				}
			}
		})
	}
}

// gnuTarOf returns a tar by GNU tar of a file that change has changed.
func gnuTarOf(t *testing.T, change func(dir string)) []byte {
	t.Helper()
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("start"), 0o644))
	change(dir)
	return gnuTar(t, dir, "--sparse")
}

// EROFS keeps the content of replaced files, directories do not.
func TestTarOfReplacedFiles(t *testing.T) {
	w := newTwin(t)
	data := makeTar(t, file("a", "first"), file("b", "other"), file("a", "second"))
	id := w.create(t, data) // checks the tar of the EROFS layer
	_, err := w.directory.OpenTar(id)
	if !errors.Is(err, ErrNoTar) || errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("directory: %v", err)
	}
	if _, err := w.erofs.OpenTar("sha256:" + "0"); !errdefs.IsNotFound(err) {
		t.Errorf("missing layer: %v", err)
	}
}

// Damage to the record or the content is an error and never a wrong tar.
func TestDamagedRecords(t *testing.T) {
	w := newTwin(t)
	var entries []header
	for i := range 2000 {
		entries = append(entries, file(fmt.Sprintf("dir/%d", i), strings.Repeat(fmt.Sprint(i), 20)))
	}
	data := makeTar(t, entries...)
	id := w.create(t, data)
	for _, s := range []*Store{w.directory, w.erofs} {
		record := filepath.Join(s.layerDir(id), tarFile)
		good, err := os.ReadFile(record)
		testutil.Must(t, err)
		for at := 0; at < len(good); at += max(1, len(good)/41) {
			bad := append([]byte{}, good...)
			bad[at] ^= 0x55
			testutil.Must(t, os.WriteFile(record, bad, 0o600))
			whole, err := restore(t, s)
			if err == nil && bytes.Equal(whole, data) {
				continue // a bit that deflate does not use
			}
			if errdefs.Code(err) != codes.DataLoss {
				t.Errorf("%s: byte %d: %v", s.Kind(), at, err)
			}
		}
		testutil.Must(t, os.WriteFile(record, good[:len(good)/2], 0o600))
		expectLost(t, s)
		testutil.Must(t, os.WriteFile(record, good, 0o600))
	}
	testutil.Must(t, os.Truncate(filepath.Join(w.erofs.layerDir(id), dataFile), 4096))
	expectLost(t, w.erofs)
	testutil.Must(t, os.WriteFile(filepath.Join(w.directory.layerDir(id), treeDir, "dir/1"), nil, 0o600))
	expectLost(t, w.directory)
}

func expectLost(t *testing.T, s *Store) {
	t.Helper()
	if _, err := restore(t, s); errdefs.Code(err) != codes.DataLoss {
		t.Errorf("%s: %v", s.Kind(), err)
	}
}

// restore restores the tar of the only layer.
func restore(t *testing.T, s *Store) ([]byte, error) {
	t.Helper()
	restored, err := s.OpenTar(s.List()[0])
	if err != nil {
		return nil, err
	}
	defer func() { testutil.Must(t, restored.Close()) }()
	return io.ReadAll(restored.Whole(context.Background()))
}

// A record that names something else than a file of the layer fails.
func TestRecordsStayInTheLayer(t *testing.T) {
	s := openStore(t, t.TempDir())
	id := create(t, s, makeTar(t, dir("d", 0o755), withType(header{Header: tar.Header{Name: "pipe", Mode: 0o644}}, tar.TypeFifo),
		symlink("out", "/etc/passwd"), symlink("up", "../../layer.json"), file("in", "it")))
	content, err := s.driver.OpenContent(s.layerDir(id))
	testutil.Must(t, err)
	defer func() { testutil.Must(t, content.Close()) }()
	for _, name := range []string{"../layer.json", "/../layer.json", "out", "up", "pipe", "d", "missing", ""} {
		var p [1]byte
		if err := content.ReadContent(refTo(name), p[:], 0); err == nil {
			t.Errorf("%q: read %q", name, p)
		}
	}
	var p [2]byte
	if err := content.ReadContent(refTo("in"), p[:], 0); err != nil || string(p[:]) != "it" {
		t.Errorf("%q, %v", p, err)
	}
}

func refTo(name string) tarsplit.Ref { return tarsplit.Ref{Name: name} }
