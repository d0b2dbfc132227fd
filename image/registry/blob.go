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

	"berth/internal/errdefs"
)

const (
	// maxFailures is how often in a row a transfer may break off or find no host.
	maxFailures = 5
	// progressBytes is how much must arrive for earlier failures to be forgotten.
	progressBytes = 1 << 20
)

// Blob reads a blob from the hosts of a repository. A transfer that breaks off
// goes on where it stopped, with the next host if there are several. While a large one comes slowly, parts of it are fetched
// beside, see Config.Spare. Read returns
// io.EOF only after size and digest have been found right. URLs in the descriptor
// are not followed. Not safe for concurrent use, but for Stop.
type Blob struct {
	owner   context.Context    // of who asked for it
	ctx     context.Context    // of reading: it ends with owner, or when the blob is stopped
	stop    context.CancelFunc // ends ctx
	repo    *Repository
	want    ocispec.Descriptor
	first   int // number of the host to ask first
	onBytes func(n int)

	hash     hash.Hash
	body     io.ReadCloser // nil between transfers
	host     *endpoint     // of the current transfer, or the last
	from     string        // the same, for errors
	ahead    ahead
	offset   int64
	failures int   // since the offset mark
	mark     int64 // offset at the first of these failures
	resumed  bool  // a host has answered a request for the rest with that
	// rangeless are the hosts that have refused such a request or answered it with something else, and sent the whole up to where it was wanted.
	rangeless map[*endpoint]bool
	err       error // final result
}

// Hosts returns the number of hosts that a blob can be read from.
func (r *Repository) Hosts() int { return len(r.endpoints) }

// Blob returns a reader of a layer's blob. It sends nothing before the first
// Read. first is the number of the host to begin with, 0 for the configured
// order: a caller that got corrupt content tries another, and gets that in one piece. onBytes, if not nil, is
// called with each number of bytes received. The caller closes the blob.
func (r *Repository) Blob(ctx context.Context, want ocispec.Descriptor, first int, onBytes func(n int)) (*Blob, error) {
	if err := checkDescriptor(want, 0); err != nil {
		return nil, err
	}
	if onBytes == nil {
		onBytes = func(int) {}
	}
	b := &Blob{owner: ctx, repo: r, want: want, first: first, onBytes: onBytes, hash: want.Digest.Algorithm().Hash(), rangeless: map[*endpoint]bool{}}
	b.ctx, b.stop = context.WithCancel(ctx)
	b.ahead.partsConfig = r.parts
	if spare := r.parts.spare; spare != nil && first == 0 {
		b.ahead.leave = func() (func(), bool) { return spare(r.ref.Domain) }
	}
	return b, nil
}

// InParts reports whether a part of the blob was fetched by itself.
func (b *Blob) InParts() bool { return b.ahead.used }

// Left is how many bytes have not been read. It is not to be called beside Read.
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

// readPart reads what was fetched ahead. Of a part that fails the rest is read by a transfer as if there had been none: by
// the one that there is, if nothing of the part has come.
func (b *Blob) readPart(part *part, p []byte) int {
	began := time.Now()
	n, err := part.read(b.ctx, p, b.offset)
	b.ahead.waited += time.Since(began)
	if n > 0 && !part.entered {
		part.entered = true
		b.closeBody() // what it would bring next is here
		b.extend()    // this one may have been the trial, and is not to be the last
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

// extend has parts fetched that follow.
func (b *Blob) extend() {
	host := b.host
	b.ahead.extend(b.ctx, b.offset, b.want.Size, func(ctx context.Context, p *part) error { return b.fetchPart(ctx, host, p) })
}

// Stop ends a Read that is under way, and makes those that follow fail, until Resume. It may be called beside Read, but
// not beside Resume.
func (b *Blob) Stop() { b.stop() }

// Resume lets a blob that was stopped be read on from where it is, by another transfer. If it was not, nothing changes. What
// was found wrong with the blob before stays wrong.
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

// closeBody gives up the current transfer; its errors say nothing any more.
func (b *Blob) closeBody() {
	if b.body != nil {
		_ = b.body.Close()
		b.body = nil
	}
}

// take accounts for bytes that have arrived.
func (b *Blob) take(p []byte) {
	b.hash.Write(p)
	b.offset += int64(len(p))
	if b.offset-b.mark >= progressBytes {
		b.failures = 0
	}
	b.onBytes(len(p))
}

// verify returns io.EOF if the whole blob is what it should be.
func (b *Blob) verify() error {
	b.closeBody()
	if got := digest.NewDigest(b.want.Digest.Algorithm(), b.hash); got != b.want.Digest {
		return corrupt("%s: digest of the content from %s is %s", b, b.from, got)
	}
	return io.EOF
}

// interrupted decides whether a transfer that ended early goes on. One that
// stalled does not: its host had its time. But parts beside it may have taken what it lacked.
func (b *Blob) interrupted(err error) error {
	b.closeBody()
	if e := b.ctx.Err(); e != nil {
		return fmt.Errorf("%s: %w", b, e)
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if len(b.ahead.parts) > 0 && errors.Is(err, errStalled) {
		b.noParts()
	} else if errors.Is(err, errStalled) {
		return fmt.Errorf("%s: from %s: %w", b, b.from, &UnavailableError{Err: err})
	}
	return b.failed(&UnavailableError{Err: fmt.Errorf("from %s: %w", b.from, err), temporary: true})
}

// noParts gives up what is fetched ahead, for good.
func (b *Blob) noParts() {
	b.ahead.over.Store(true)
	b.ahead.clear()
}

// failed counts a failure and waits before the next try, or gives up. nil means
// try again.
func (b *Blob) failed(err *UnavailableError) error {
	if b.failures == 0 {
		b.mark = b.offset
	}
	b.failures++
	if b.failures >= maxFailures || !err.temporary {
		return fmt.Errorf("%s: %w", b, err)
	}
	if e := sleep(b.ctx, b.repo.delay(b.failures, err.after)); e != nil {
		return fmt.Errorf("%s: %w", b, e)
	}
	return nil
}

// open starts a transfer at the current offset. After failures the next host is
// asked first, so that one that always breaks off does not spoil all tries.
func (b *Blob) open() error {
	err := b.repo.askOnce(b.ctx, capPull, b.first+b.failures, func(e *endpoint) error {
		body, err := b.openAt(e)
		if err == nil {
			b.body, b.host, b.from = body, e, e.String()
		}
		return err
	})
	var u *UnavailableError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &u):
		return b.failed(&UnavailableError{Err: err, temporary: u.temporary, after: u.after})
	}
	return fmt.Errorf("%s: %w", b, err)
}

// openAt asks one host for the blob from the current offset on. No blob fails because of ranges: a host that refuses the request for the
// rest, or answers it with what is not said to be that, is asked for the whole, and so is one, in the last try, that never had an answer to such requests.
func (b *Blob) openAt(e *endpoint) (io.ReadCloser, error) {
	last := b.failures == maxFailures-1 && !b.resumed
	rest := b.offset > 0 && !b.rangeless[e] && !last
	resp, refused, err := b.ask(e, rest)
	if err != nil {
		return nil, err
	}
	whole := resp.StatusCode == http.StatusOK || (!rest || refused) && b.isWhole(resp)
	switch {
	case whole:
		err = b.skip(resp)
		b.rangeless[e] = err == nil && (refused || b.rangeless[e]) // one that breaks off before is asked for the rest again: it may have refused that for another reason
	case resp.StatusCode == http.StatusPartialContent:
		_, err = rangeOf(resp, b.offset, b.want.Size)
		b.resumed = b.resumed || err == nil
	default:
		return nil, e.statusError(resp)
	}
	if err != nil {
		_ = resp.Body.Close()
		return nil, err
	}
	b.noteRanges(resp, whole)
	return resp.Body, nil
}

// ask asks one host for the rest of the blob, or for the whole, or for that too if the host has refused the rest.
func (b *Blob) ask(e *endpoint, rest bool) (_ *http.Response, refused bool, err error) {
	header := http.Header{"Accept": {"*/*"}}
	if rest { // with its end: go-containerregistry's registry answers 416 to a range that has none
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

// isWhole tells the answer to a request without a range from a server that sends everything as 206.
func (b *Blob) isWhole(resp *http.Response) bool {
	if resp.StatusCode != http.StatusPartialContent {
		return false
	}
	last, err := rangeOf(resp, 0, b.want.Size)
	return resp.Header.Get("Content-Range") == "" || err == nil && last == b.want.Size-1
}

// refusesRange tells an answer that may be about the range: the same request without one may do. A partial answer without the right
// Content-Range is one: caches and proxies that strip that header, or send it all as 206.
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

// noteRanges notes what an answer, with the whole blob or the rest, tells of whether its host has ranges.
func (b *Blob) noteRanges(resp *http.Response, whole bool) {
	accepts := resp.Header.Get("Accept-Ranges")
	switch ignored := b.offset > 0 && whole; {
	case ignored, !resp.ProtoAtLeast(1, 1), strings.EqualFold(accepts, "none"):
		b.noParts()
	case !whole, strings.EqualFold(accepts, "bytes"):
		b.ahead.ranges.Store(true)
	}
}

// path is the blob's below the repository.
func (b *Blob) path() string { return "blobs/" + b.want.Digest.String() }

// skip checks an answer with the whole blob and reads over what we have already.
func (b *Blob) skip(resp *http.Response) error {
	if resp.ContentLength >= 0 && resp.ContentLength != b.want.Size {
		return corrupt("size is %d bytes, not %d", resp.ContentLength, b.want.Size)
	}
	if _, err := io.CopyN(io.Discard, resp.Body, b.offset); err != nil {
		return bodyError(b.ctx, err)
	}
	return nil
}

// rangeOf checks that a partial answer begins where it should and belongs to
// a blob of the right size. It returns where it ends.
func rangeOf(resp *http.Response, offset, size int64) (last int64, err error) {
	var first int64
	var total string
	value := resp.Header.Get("Content-Range")
	n, err := fmt.Sscanf(value, "bytes %d-%d/%s", &first, &last, &total)
	if n != 3 || err != nil || value != fmt.Sprintf("bytes %d-%d/%s", first, last, total) { // Sscanf takes signs, and what follows
		return 0, errdefs.Internal("partial answer with the Content-Range %q", errdefs.Clip(value))
	}
	if first != offset || last < first || last >= size || total != "*" && total != fmt.Sprint(size) {
		return 0, corrupt("Content-Range is %q, not bytes %d-…/%d", errdefs.Clip(value), offset, size)
	}
	return last, nil
}

// String names the blob in errors: which, of which image, and how far it got.
func (b *Blob) String() string {
	return fmt.Sprintf("fetch %s of %s: at byte %d of %d", b.want.Digest, b.repo.ref, b.offset, b.want.Size)
}
