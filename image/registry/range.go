package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
	"berth/internal/fair"
)

// ErrNoRanges is wrapped by the error if a host does not answer a range request with the range.
var ErrNoRanges = errors.New("the host does not serve ranges")

// Range reads a range of a blob from the hosts of a repository. It continues an interrupted
// transfer with the next host. It verifies nothing. Its methods must not be called concurrently.
type Range struct {
	ctx      context.Context
	repo     *Repository
	blob     ocispec.Descriptor
	onBytes  func(n int)
	offset   int64 // in the blob, of the next byte
	end      int64
	next     int // number of the host to ask next
	host     int // number of the host of the last transfer
	body     io.ReadCloser
	failures int
}

// Range requests size bytes of a blob from an offset. It asks the hosts in order, beginning with
// the number first, and returns when a host has begun to answer. onBytes is called with each number
// of received bytes. The caller closes the Range. It returns the errors of [Blob.Read], and
// FailedPrecondition, which wraps [ErrNoRanges], if no host serves ranges.
func (r *Repository) Range(ctx context.Context, blob ocispec.Descriptor, first int, offset, size int64,
	onBytes func(n int)) (*Range, error) {
	if err := checkDescriptor(blob, 0); err != nil {
		return nil, err
	}
	if offset < 0 || size <= 0 || offset+size > blob.Size {
		return nil, errdefs.Internal("range of %d bytes at %d of %d", size, offset, blob.Size)
	}
	b := &Range{ctx: ctx, repo: r, blob: blob, onBytes: onBytes, offset: offset, end: offset + size, next: first}
	if err := b.open(); err != nil {
		return nil, err
	}
	return b, nil
}

// open begins a transfer of the rest.
func (b *Range) open() error {
	err := b.repo.askOnce(b.ctx, capPull, b.next, func(e *endpoint) (err error) {
		if b.body, err = b.ask(e); err == nil {
			b.host = slices.Index(b.repo.endpoints, e)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("fetch bytes %d to %d of %s of %s: %w", b.offset, b.end, b.blob.Digest, b.repo.ref, err)
	}
	return nil
}

// ask requests the rest from one host. The wait for an answer has the same limit as the wait for a
// byte. Another host may answer before a connection times out.
func (b *Range) ask(e *endpoint) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(b.ctx)
	late := time.AfterFunc(e.stall, func() { cancel(fair.ErrStalled) })
	resp, err := e.request(ctx, http.MethodGet, "blobs/"+b.blob.Digest.String(), http.Header{"Accept": {"*/*"},
		"Range": {fmt.Sprintf("bytes=%d-%d", b.offset, b.end-1)}})
	switch inTime := late.Stop(); {
	case err != nil && errors.Is(context.Cause(ctx), fair.ErrStalled):
		err = &UnavailableError{Err: fmt.Errorf("no answer within %v: %w", e.stall, err)}
	case err != nil:
	case !inTime:
		_ = resp.Body.Close()
		err = &UnavailableError{Err: fmt.Errorf("no answer within %v", e.stall)}
	default:
		err = b.check(e, resp)
	}
	if err != nil {
		cancel(nil)
		return nil, err
	}
	return cancelingBody{resp.Body, func() { cancel(nil) }}, nil
}

// check checks that a response has the range. Otherwise it closes the body.
func (b *Range) check(e *endpoint, resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusPartialContent:
		last, err := rangeOf(resp, b.offset, b.blob.Size)
		if err == nil && last != b.end-1 {
			err = corrupt("range ends at %d, not %d", last, b.end-1)
		}
		if err != nil {
			_ = resp.Body.Close()
		}
		return err
	case http.StatusOK, http.StatusRequestedRangeNotSatisfiable:
		_ = resp.Body.Close() // it may be the whole blob
		return errdefs.FailedPrecondition("%w: answer %s", ErrNoRanges, errdefs.Clip(resp.Status))
	}
	return e.statusError(resp)
}

// cancelingBody is a body whose Close also ends its context.
type cancelingBody struct {
	io.ReadCloser
	cancel func()
}

func (c cancelingBody) Close() error {
	defer c.cancel()
	return c.ReadCloser.Close()
}

// Host returns the number of the host that sent the last bytes.
func (b *Range) Host() int { return b.host }

// Read implements io.Reader.
func (b *Range) Read(p []byte) (int, error) {
	for b.offset < b.end {
		if b.body == nil {
			if err := b.open(); err != nil {
				return 0, err
			}
		}
		n, err := b.body.Read(p[:min(int64(len(p)), b.end-b.offset)])
		b.offset += int64(n)
		b.onBytes(n)
		if err != nil && b.offset < b.end {
			err = b.interrupted(err)
		} else {
			err = nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
	return 0, io.EOF
}

// interrupted ends a transfer that has failed. The next transfer uses another host. interrupted
// returns an error if there were too many failures.
func (b *Range) interrupted(err error) error {
	_ = b.Close()
	if b.ctx.Err() != nil {
		return fmt.Errorf("fetch %s: %w", b.blob.Digest, b.ctx.Err())
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if b.failures++; b.failures >= max(maxFailures, b.repo.Hosts()) {
		return &UnavailableError{Err: fmt.Errorf("fetch %s: %w", b.blob.Digest, err)}
	}
	b.next = b.host + 1
	return nil
}

// Close ends the transfer.
func (b *Range) Close() error {
	if b.body == nil {
		return nil
	}
	err := b.body.Close()
	b.body = nil
	return err
}
