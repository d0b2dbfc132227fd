package fill

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// blobBuffer is the size of one read of a kept blob.
const blobBuffer = 1 << 20

// verifyBlob compares the digest of the kept blob and proves the index. The parts of the blob that
// contain no file content were not verified on arrival. If the digest is wrong, it fetches the blob
// again.
func (l *Layer) verifyBlob(ctx context.Context) error {
	for failures, mismatches := 0, 0; ; failures++ {
		err := l.hashBlob(ctx)
		if err == nil {
			return l.proveIndex(ctx, io.NewSectionReader(l.blob, 0, l.x.BlobSize))
		}
		if !errors.Is(err, blobindex.ErrMismatch) {
			return err
		}
		if mismatches++; mismatches >= maxMismatches {
			return errdefs.New(codes.DataLoss, "%w", err)
		}
		l.e.cfg.Log.Warn("a layer's blob was wrong where it has no content; it is fetched again", "layer", l.name, "error", err)
		l.rejectSource(ctx)
		for err = l.fetchBlob(ctx); err != nil; err = l.fetchBlob(ctx) {
			l.e.cfg.Log.Info("fetching a blob will be tried again", "layer", l.name, "error", err)
			if failures++; !l.pause(failures) {
				return context.Cause(ctx)
			}
		}
	}
}

// hashBlob returns an error that wraps blobindex.ErrMismatch if the kept blob has another digest.
func (l *Layer) hashBlob(ctx context.Context) error {
	h := l.x.Blob.Algorithm().Hash()
	buf := make([]byte, blobBuffer)
	for at := int64(0); at < l.x.BlobSize; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		part := buf[:min(int64(len(buf)), l.x.BlobSize-at)]
		if _, err := l.blob.ReadAt(part, at); err != nil && !errors.Is(err, io.EOF) {
			return errdefs.New(codes.DataLoss, "read the kept blob: %w", err)
		} else if err != nil {
			return fmt.Errorf("%w %s: it is shorter", blobindex.ErrMismatch, l.x.Blob)
		}
		h.Write(part)
		at += int64(len(part))
	}
	if d := digest.NewDigest(l.x.Blob.Algorithm(), h); d != l.x.Blob {
		return fmt.Errorf("%w %s, but of %s", blobindex.ErrMismatch, l.x.Blob, d)
	}
	return nil
}

// rejectSource makes the next requests go to another host, if there is one.
func (l *Layer) rejectSource(ctx context.Context) {
	body, err := l.source.Range(ctx, 0, 1)
	if err != nil {
		return // the source asks the next host by itself
	}
	if r, ok := body.(Rejecter); ok {
		r.Reject()
	}
	_ = body.Close() // the content does not matter
}

// fetchBlob fetches the whole blob again.
func (l *Layer) fetchBlob(ctx context.Context) error {
	for at := int64(0); at < l.x.BlobSize; at += maxRequest {
		if err := l.fetchPart(ctx, at, min(maxRequest, l.x.BlobSize-at)); err != nil {
			return fmt.Errorf("fetch %s again: %w", l.x.Blob, err)
		}
	}
	return nil
}

// fetchPart fetches a range of the blob into BlobFile.
func (l *Layer) fetchPart(ctx context.Context, offset, size int64) (err error) {
	release, err := l.e.reserve(ctx, inBackground, blobBuffer)
	if err != nil {
		return err
	}
	defer release()
	body, err := l.source.Range(ctx, offset, size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, body.Close()) }()
	failpoint.Reach("lazy.fetch-blob")
	to := onlyWriter{io.NewOffsetWriter(l.blob, offset)}
	n, err := io.CopyBuffer(to, io.LimitReader(body, size), make([]byte, blobBuffer))
	failpoint.Reach("lazy.blob-fetched")
	if err == nil && n < size {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// onlyWriter hides other methods from io.CopyBuffer, which would not use its buffer.
type onlyWriter struct{ io.Writer }
