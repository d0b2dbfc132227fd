package layer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack/tarsplit"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// tarFile is the record of a layer's tar in the directory of the layer.
const tarFile = "tar"

// ErrNoTar is wrapped by errors of OpenTar about layers whose tar cannot be restored.
var ErrNoTar = errors.New("the tar of the layer cannot be restored")

// ErrOldLayer is wrapped by errors with ErrNoTar about layers that can be restored once they are
// pulled again.
var ErrOldLayer = errors.New("an earlier version of berth stored it")

// Content is the content of a layer's files. The caller closes it.
type Content interface {
	tarsplit.Content
	io.Closer
}

// Tar is the tar of a layer, restored byte by byte. It is safe for concurrent use.
type Tar struct {
	*tarsplit.Reader
	digest  digest.Digest
	record  *os.File
	content Content
}

// OpenTar opens the tar of a layer. The caller keeps the layer from removal and closes the Tar.
// Errors: NotFound; FailedPrecondition, which wraps ErrNoTar, if the layer has no record of its
// tar. A layer has no record if an earlier berth made it. Other layers have none if the tar
// replaces entries in a way that loses content, or if the record would be too large.
//
// ReadAt returns any range. It does not verify the range, because the digest covers the whole tar.
// Whole verifies the tar.
func (s *Store) OpenTar(name digest.Digest) (_ *Tar, err error) {
	info, err := s.Info(name)
	if err != nil {
		return nil, err
	}
	dir := s.layerDir(name)
	if info.Record == 0 {
		return nil, noTar(dir)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	record, err := os.Open(filepath.Join(dir, tarFile))
	if err != nil {
		return nil, err
	}
	undo.Add("close record", record.Close)
	content, err := s.driver.OpenContent(dir)
	if err != nil {
		return nil, err
	}
	undo.Add("close content", content.Close)
	t := &Tar{digest: cmp.Or(info.TarDigest, info.DiffID), record: record, content: content}
	if t.Reader, err = tarsplit.Open(record, info.Record, info.TarBytes, content); err != nil {
		return nil, lostTar(fmt.Errorf("layer %s: %w", name, err))
	}
	undo.Release()
	return t, nil
}

// noTar returns the reason why the layer in dir has no record of its tar.
func noTar(dir string) error {
	if _, err := os.Lstat(filepath.Join(dir, tarFile)); errors.Is(err, fs.ErrNotExist) {
		return errdefs.FailedPrecondition("%w: %w", ErrNoTar, ErrOldLayer)
	}
	return errdefs.FailedPrecondition(
		"%w: its entries replace each other, or have too much metadata", ErrNoTar)
}

// Close closes the files of the layer.
func (t *Tar) Close() error { return errors.Join(t.record.Close(), t.content.Close()) }

// Digest returns the digest of the tar.
func (t *Tar) Digest() digest.Digest { return t.digest }

// Whole returns a reader of the whole tar. It returns io.EOF only after it has verified the digest.
// If the digest is wrong, it returns DataLoss.
func (t *Tar) Whole(ctx context.Context) io.Reader {
	verifier := t.digest.Algorithm().Hash()
	from := untilDone{ctx, io.NewSectionReader(t.Reader, 0, t.Size())}
	return readFunc(func(p []byte) (int, error) {
		n, err := from.Read(p)
		_, _ = verifier.Write(p[:n]) // a hash does not fail
		if errors.Is(err, io.EOF) {
			if got := digest.NewDigest(t.digest.Algorithm(), verifier); got != t.digest {
				return n, errdefs.New(codes.DataLoss, "the restored tar has the digest %s, not %s", got, t.digest)
			}
			return n, err
		}
		return n, lostTar(err)
	})
}

type readFunc func(p []byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// lostTar adds the gRPC code to errors about the record.
func lostTar(err error) error {
	if errors.Is(err, tarsplit.ErrDamaged) {
		return errdefs.New(codes.DataLoss, "%w", err)
	}
	return err
}

// shortContent is the error if content is shorter than the record says.
func shortContent(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: the layer has less content", tarsplit.ErrDamaged)
	}
	return err
}

// makeRecord creates the file for the record of the tar of a layer.
func makeRecord(dir string) (*os.File, error) {
	failpoint.Reach("layer.make-tar-record")
	f, err := os.OpenFile(filepath.Join(dir, tarFile), newFile, 0o600)
	failpoint.Reach("layer.tar-record-made")
	return f, err
}

// recordSize returns the length of the record. berth-unpack wrote it and may be compromised.
func recordSize(dir string) (int64, error) {
	st, err := os.Lstat(filepath.Join(dir, tarFile))
	if err != nil {
		return 0, err
	}
	if st.Size() > tarsplit.MaxFile {
		return 0, errdefs.FailedPrecondition("record of the tar has %d bytes", st.Size())
	}
	return st.Size(), nil
}
