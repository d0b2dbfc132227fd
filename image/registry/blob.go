package registry

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/blobindex"
	"berth/internal/errdefs"
	"berth/internal/fair"
)

// Blob reads a blob from the hosts of a repository. After any interruption it keeps the received
// bytes and continues with the next host. It fails when no host is left, see blobHosts. If a large
// blob arrives slowly, it also fetches later parts in parallel, see Spare in [Config]. Read returns
// io.EOF only after it has verified size and digest. Only [Blob.Stop] may be called concurrently
// with other methods.
type Blob struct {
	owner   context.Context    // the caller's context
	ctx     context.Context    // of transfers: done when owner is done or the blob is stopped
	stop    context.CancelFunc // cancels ctx
	repo    *Repository
	want    ocispec.Descriptor
	hosts   *blobHosts
	onBytes func(n int)

	hash   hash.Hash
	states *blobindex.Hash // the hash, if NoteStates was called
	body   io.ReadCloser   // nil between transfers
	host   *blobHost       // of the current or last transfer
	ahead  ahead
	offset int64 // of the next byte from the network
	kept   kept
	err    error // final result
}

// kept is the start of a blob that was received earlier.
type kept struct {
	content io.Reader
	left    int64 // unread bytes
	used    bool  // a host has agreed to send the rest
}

// ResumeFrom makes the blob begin with size bytes that were received earlier, fewer than the blob
// has. They are not trusted, because the digest covers them. They are not read before a host has
// answered the request for the rest. It must be called before the first Read.
func (b *Blob) ResumeFrom(content io.Reader, size int64) {
	if size > 0 && size < b.want.Size {
		b.kept, b.offset = kept{content: content, left: size}, size
	}
}

// NoteStates makes the blob note the states of its hash, see [Blob.States]. It does nothing for a
// blob that is not named by SHA-256. It must be called before the first Read.
func (b *Blob) NoteStates() {
	if b.want.Digest.Algorithm() == digest.SHA256 {
		b.states = blobindex.NewHash()
		b.hash = b.states
	}
}

// States returns the states of the blob's hash, for [blobindex.Index]. Call it after Read has
// returned io.EOF.
func (b *Blob) States() ([]blobindex.State, error) {
	if b.states == nil || !errors.Is(b.err, io.EOF) {
		return nil, errors.New("the blob was not read to its end, or has no states")
	}
	return b.states.States(b.want.Size)
}

// Hosts returns the number of hosts that may serve a blob.
func (r *Repository) Hosts() int { return len(r.endpoints) }

// Blob returns a reader for a layer's blob. It sends nothing before the first Read. first is the
// number of the first host to try; 0 is the configured order. After corrupt content the caller
// tries the next number, see [Repository.Attempts]. With a number above 0 the blob is not fetched
// in parts. onBytes, if not nil, is called with each number of received bytes. The caller closes
// the blob.
func (r *Repository) Blob(ctx context.Context, want ocispec.Descriptor, first int, onBytes func(n int)) (*Blob, error) {
	if err := checkDescriptor(want, 0); err != nil {
		return nil, err
	}
	if onBytes == nil {
		onBytes = func(int) {}
	}
	b := &Blob{
		owner:   ctx,
		repo:    r,
		want:    want,
		hosts:   r.blobHosts(want, first),
		onBytes: onBytes,
		hash:    want.Digest.Algorithm().Hash(),
	}
	b.ctx, b.stop = context.WithCancel(ctx)
	b.ahead.partsConfig = r.parts
	if spare := r.parts.spare; spare != nil && first == 0 {
		b.ahead.leave = func() (func(), bool) { return spare(r.ref.Domain) }
	}
	return b, nil
}

// Resumed reports whether the blob begins with bytes from an earlier transfer.
func (b *Blob) Resumed() bool { return b.kept.used }

// InPieces reports whether the blob came in more than one answer, or from several hosts. Then a
// wrong digest does not show which host is wrong.
func (b *Blob) InPieces() bool { return b.ahead.used || b.kept.used || b.hosts.transfers > 1 }

// Left returns the number of bytes that were not received yet. It must not be called concurrently
// with Read.
func (b *Blob) Left() int64 { return b.want.Size - b.offset }

// Read implements io.Reader.
func (b *Blob) Read(p []byte) (int, error) {
	for b.err == nil {
		if b.offset == b.want.Size {
			b.err = b.verify()
			break
		}
		var n int
		switch part := b.ahead.at(b.offset); {
		case b.kept.used && b.kept.left > 0:
			n = b.readKept(p)
		case part != nil:
			n = b.readPart(part, p)
		case b.body == nil:
			b.err = b.open()
		default:
			n = b.readBody(p)
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, b.err
}

// readKept reads from the bytes that were received earlier.
func (b *Blob) readKept(p []byte) int {
	n, err := b.kept.content.Read(p[:min(int64(len(p)), b.kept.left)])
	b.hash.Write(p[:n])
	b.kept.left -= int64(n)
	switch {
	case b.ctx.Err() != nil:
		b.err = fmt.Errorf("%s: %w", b, b.ctx.Err())
	case err != nil && b.kept.left > 0:
		b.err = corrupt("%s: read of the bytes from an earlier transfer: %w", b, err)
	}
	return n
}

// readBody reads from the current transfer.
func (b *Blob) readBody(p []byte) int {
	began := time.Now()
	n, err := b.body.Read(p[:min(int64(len(p)), b.ahead.limit(b.offset, b.want.Size))])
	b.take(p[:n])
	if err != nil && b.offset < b.want.Size {
		b.err = b.interrupted(err)
	} else if b.ahead.waits(began, time.Now(), n) {
		b.extend()
	}
	return n
}

// readPart reads a part that was fetched ahead. If the part fails, a transfer reads the rest of it.
// That is the current transfer if no byte of the part has arrived.
func (b *Blob) readPart(part *part, p []byte) int {
	began := time.Now()
	n, err := part.read(b.ctx, p, b.offset)
	b.ahead.waited += time.Since(began)
	if n > 0 && !part.entered {
		part.entered = true
		b.closeBody() // its next bytes are in the part
		b.extend()    // after a successful trial part, more follow
	}
	b.take(p[:n])
	switch {
	case b.ctx.Err() != nil && err != nil:
		b.err = fmt.Errorf("%s: %w", b, b.ctx.Err())
	case err != nil:
		b.ahead.drop()
	case b.offset == part.end():
		b.ahead.judge(time.Now())
		b.ahead.drop()
		b.extend()
	}
	return n
}

// extend starts fetching the following parts.
func (b *Blob) extend() {
	host := b.host.endpoint
	b.ahead.extend(b.ctx, b.offset, b.want.Size, func(ctx context.Context, p *part) error {
		return b.fetchPart(ctx, host, p)
	})
}

// Stop ends a current Read, and makes later Reads fail until [Blob.Resume]. It may be called
// concurrently with Read, but not with Resume.
func (b *Blob) Stop() { b.stop() }

// Resume lets a stopped blob continue at its offset with a new transfer. An earlier error about the
// blob's content stays. It does nothing if the blob was not stopped.
func (b *Blob) Resume() {
	if b.ctx.Err() == nil {
		return
	}
	b.closeBody()
	b.ahead.clear()
	if errors.Is(b.err, context.Canceled) {
		b.err = nil
	}
	b.ctx, b.stop = context.WithCancel(b.owner)
}

// Close ends the transfer.
func (b *Blob) Close() error {
	b.stop()
	b.closeBody()
	b.ahead.clear()
	if b.err == nil {
		b.err = errors.New("read of a closed blob")
	}
	return nil
}

// closeBody abandons the current transfer. Its errors do not matter any more.
func (b *Blob) closeBody() {
	if b.body != nil {
		_ = b.body.Close()
		b.body = nil
	}
}

// take hashes and counts received bytes.
func (b *Blob) take(p []byte) {
	b.hash.Write(p)
	b.offset += int64(len(p))
	b.host.progress(len(p))
	b.onBytes(len(p))
}

// verify returns io.EOF if size and digest of the blob are right. If the whole blob came in one
// answer of one host, it notes that this host has a wrong blob.
func (b *Blob) verify() error {
	b.closeBody()
	got := digest.NewDigest(b.want.Digest.Algorithm(), b.hash)
	if got == b.want.Digest {
		return io.EOF
	}
	if !b.InPieces() && b.host != nil {
		b.repo.noteWrong(b.host.endpoint, b.want.Digest)
	}
	return corrupt("%s: digest of the content from %s is %s", b, b.hosts.senders(), got)
}

// interrupted ends a transfer before the end of the blob. If a transfer stalled while parts were
// fetched, the parts may have taken its bandwidth.
func (b *Blob) interrupted(err error) error {
	b.closeBody()
	if e := b.ctx.Err(); e != nil {
		return fmt.Errorf("%s: %w", b, e)
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	u := &UnavailableError{Err: err, temporary: true}
	switch {
	case !errors.Is(err, fair.ErrStalled):
	case len(b.ahead.parts) > 0:
		b.noParts()
	default:
		b.host.failure.Store(u) // the image's further blobs come from other hosts
	}
	b.hosts.failed(b.host, u)
	return nil
}

// noParts stops fetching parts ahead for the rest of the blob.
func (b *Blob) noParts() {
	b.ahead.over.Store(true)
	b.ahead.clear()
}

// open asks the next host for the blob, from the current offset on. If a host fails and another one
// is left, it returns nil and leaves body nil.
func (b *Blob) open() error {
	h, err := b.hosts.next(b.ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", b, err)
	}
	body, err := b.openAt(h)
	if err == nil {
		b.body, b.host = body, h
		b.kept.used = b.kept.left > 0 || b.kept.used
		b.hosts.began(h)
		return nil
	}
	if b.ctx.Err() != nil {
		return fmt.Errorf("%s: %w", b, err)
	}
	b.hosts.failed(h, err)
	return nil
}

// openAt requests the blob from one host, from the current offset on. A blob never fails only
// because a host does not support ranges. If a host refuses the request for the rest, or ignores
// the range, openAt requests the whole blob. It also requests the whole blob in the last try if the
// host has never answered a range request.
func (b *Blob) openAt(h *blobHost) (io.ReadCloser, error) {
	rest := b.offset > 0 && !h.rangeless && (h.resumed || !h.isLastTry())
	resp, refused, err := b.ask(h.endpoint, rest)
	if err != nil {
		return nil, err
	}
	whole := resp.StatusCode == http.StatusOK || (!rest || refused) && b.isWhole(resp)
	switch {
	case whole:
		err = b.skip(resp)
		// If the transfer of the whole blob breaks off, the next try requests the rest again. The
		// refusal may have had another reason.
		h.rangeless = err == nil && (refused || h.rangeless)
	case resp.StatusCode == http.StatusPartialContent:
		_, err = rangeOf(resp, b.offset, b.want.Size)
		h.resumed = h.resumed || err == nil
	default:
		return nil, h.statusError(resp)
	}
	if err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	b.noteRanges(resp, whole)
	return resp.Body, nil
}

// ask requests the rest of the blob, or the whole. If the host refuses the rest, it requests the
// whole.
func (b *Blob) ask(e *endpoint, rest bool) (_ *http.Response, refused bool, err error) {
	header := http.Header{"Accept": {"*/*"}}
	if rest { // with the last byte, because go-containerregistry's registry answers an open range with 416
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", b.offset, b.want.Size-1))
	}
	resp, err := e.request(b.ctx, http.MethodGet, b.path(), header)
	if err != nil || !rest || !b.refusesRange(resp) {
		return resp, false, err
	}
	drain(resp.Body)
	resp, _, err = b.ask(e, false)
	return resp, true, err
}

// isWhole reports whether a 206 response to a request without range has the whole blob, as some
// servers send it.
func (b *Blob) isWhole(resp *http.Response) bool {
	if resp.StatusCode != http.StatusPartialContent {
		return false
	}
	last, err := rangeOf(resp, 0, b.want.Size)
	return resp.Header.Get("Content-Range") == "" || err == nil && last == b.want.Size-1
}

// refusesRange reports whether a response may be due to the range, so that a request without one
// may succeed. It also returns true for a 206 response with a missing or wrong Content-Range. Some
// caches and proxies strip that header or send everything as 206.
func (b *Blob) refusesRange(resp *http.Response) bool {
	switch status := resp.StatusCode; status {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooManyRequests:
		return false
	case http.StatusNotImplemented:
		return true
	case http.StatusPartialContent:
		_, err := rangeOf(resp, b.offset, b.want.Size)
		return err != nil
	default:
		return status >= http.StatusBadRequest && status < http.StatusInternalServerError
	}
}

// noteRanges records whether the host of a response supports ranges.
func (b *Blob) noteRanges(resp *http.Response, whole bool) {
	accepts := resp.Header.Get("Accept-Ranges")
	switch ignored := b.offset > 0 && whole; {
	case ignored, !resp.ProtoAtLeast(1, 1), strings.EqualFold(accepts, "none"):
		b.noParts()
	case !whole, strings.EqualFold(accepts, "bytes"):
		b.ahead.ranges.Store(true)
	}
}

// path returns the blob's path below the repository.
func (b *Blob) path() string { return "blobs/" + b.want.Digest.String() }

// skip checks a response with the whole blob and reads past the current offset.
func (b *Blob) skip(resp *http.Response) error {
	if resp.ContentLength >= 0 && resp.ContentLength != b.want.Size {
		return corrupt("size is %d bytes, not %d", resp.ContentLength, b.want.Size)
	}
	if _, err := io.CopyN(io.Discard, resp.Body, b.offset); err != nil {
		return bodyError(b.ctx, err)
	}
	return nil
}

// rangeOf checks that a partial response starts at offset and belongs to a blob of the right size.
// It returns the last position.
func rangeOf(resp *http.Response, offset, size int64) (last int64, err error) {
	var first int64
	var total string
	value := resp.Header.Get("Content-Range")
	n, err := fmt.Sscanf(value, "bytes %d-%d/%s", &first, &last, &total)
	if n != 3 || err != nil || value != fmt.Sprintf("bytes %d-%d/%s", first, last,
		total) { // Sscanf accepts signs and trailing text
		return 0, errdefs.Internal("partial answer with the Content-Range %q", errdefs.Clip(value))
	}
	if first != offset || last < first || last >= size || total != "*" && total != fmt.Sprint(size) {
		return 0, corrupt("Content-Range is %q, not bytes %d-…/%d", errdefs.Clip(value), offset, size)
	}
	return last, nil
}

// String names the blob in errors: digest, image and offset.
func (b *Blob) String() string {
	return fmt.Sprintf("fetch %s of %s: at byte %d of %d", b.want.Digest, b.repo.ref, b.offset, b.want.Size)
}
