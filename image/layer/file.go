package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"time"

	"berth/image/unpack"
	"berth/internal/errdefs"
)

// File is the only file of a layer.
type File struct {
	Path    string // relative and clean
	Size    int64
	Content io.Reader // Size bytes; implements unpack.Stopper if its Read may wait
}

const (
	tarBlock   = 512
	tarTrailer = 2 * tarBlock // zeros at the end of an archive
)

// tar returns a tar with the file, and its length. The file belongs to root, everyone may read it,
// and its time is 0, so the tar is the same on each machine.
func (f File) tar() (io.Reader, int64, error) {
	var head bytes.Buffer
	err := tar.NewWriter(&head).WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: "./" + f.Path, // so that the tar never begins like a compressed tar
		Size: f.Size, Mode: 0o644, ModTime: time.Unix(0, 0),
	})
	if err != nil {
		return nil, 0, errdefs.InvalidArgument("%w", err)
	}
	rest := (tarBlock-f.Size%tarBlock)%tarBlock + tarTrailer
	size := int64(head.Len()) + f.Size + rest
	content := &exactly{from: f.Content, left: f.Size}
	all := io.MultiReader(&head, content, bytes.NewReader(make([]byte, rest)))
	if s, ok := f.Content.(unpack.Stopper); ok {
		return stoppable{all, s}, size, nil
	}
	return all, size, nil
}

// stoppable is a reader of a blob that can be stopped.
type stoppable struct {
	io.Reader
	unpack.Stopper
}

// exactly reads to the end of a reader, which must have the given length. An io.LimitReader would
// not read to io.EOF, where a blob verifies its digest.
type exactly struct {
	from io.Reader
	left int64
}

func (e *exactly) Read(p []byte) (int, error) {
	n, err := e.from.Read(p)
	if e.left -= int64(n); e.left < 0 || errors.Is(err, io.EOF) && e.left > 0 {
		return n, errdefs.Internal("content of the file has another length")
	}
	return n, err
}
