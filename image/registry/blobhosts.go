package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
	"berth/internal/fair"
)

const (
	// maxFailures limits the consecutive interrupted transfers and temporary refusals of a host.
	maxFailures = 5
	// progressBytes must arrive from a host before its earlier failures are forgotten.
	progressBytes = 1 << 20
	// leastBytes must arrive between two stalls of a host.
	leastBytes = 64 << 10
)

// blobHosts are the hosts of one blob. A host with a temporary failure is asked again, after the
// hosts that have not failed. A host is out if it refuses the blob, sends wrong content, cannot be
// reached, or fails too often. The blob fails when all hosts are out.
type blobHosts struct {
	repo      *Repository
	blob      digest.Digest
	all       []*blobHost // in the order to ask them
	transfers int         // begun so far
}

// blobHost is what one blob knows of a host.
type blobHost struct {
	*endpoint
	served   bool      // a transfer from it has begun
	failures int       // since it was last known to work
	received int64     // bytes since the first of these failures
	fresh    int64     // bytes since the last of these failures
	ready    time.Time // when it may be asked again; zero: it has not failed
	out      bool
	err      error // the last failure

	resumed bool // it has served a request for the rest
	// rangeless is set if the host does not serve ranges. Its answer to a request for the rest was
	// the whole blob, at least up to the wanted offset.
	rangeless bool
}

// blobHosts returns the hosts of a blob, starting with number first, and then its URLs. It leaves
// out the hosts that have sent wrong content, unless all hosts have.
func (r *Repository) blobHosts(blob ocispec.Descriptor, first int) *blobHosts {
	l := &blobHosts{repo: r, blob: blob.Digest}
	places := r.hosts(capPull, first)
	right := slices.DeleteFunc(slices.Clone(places), func(e *endpoint) bool { return r.isWrong(e, blob.Digest) })
	if len(right) > 0 {
		places = right
	}
	for _, e := range append(places, r.foreign(blob)...) {
		l.all = append(l.all, &blobHost{endpoint: e})
	}
	return l
}

// next waits until the next host may be asked, and returns it. If none is left, the error has the
// reason of each host.
func (l *blobHosts) next(ctx context.Context) (*blobHost, error) {
	var next *blobHost
	for _, h := range l.all {
		if !h.out && (next == nil || h.isBefore(next)) {
			next = h
		}
	}
	if next == nil {
		return nil, l.error()
	}
	return next, sleep(ctx, time.Until(next.ready))
}

// isBefore reports whether host h is asked before o, which precedes it in the configured order. A
// host that could not be reached for another blob comes last. URLs come after all hosts.
func (h *blobHost) isBefore(o *blobHost) bool {
	if h.foreign != o.foreign {
		return !h.foreign
	}
	if down := h.down() != nil; down != (o.down() != nil) {
		return !down
	}
	return h.ready.Before(o.ready)
}

// isLastTry reports whether one more failure ends the use of a host.
func (h *blobHost) isLastTry() bool { return h.failures == maxFailures-1 }

// began records that a host has begun to send.
func (l *blobHosts) began(h *blobHost) {
	l.transfers++
	h.served = true
	l.repo.noteServed(h.endpoint)
}

// progress records received bytes.
func (h *blobHost) progress(n int) {
	h.received += int64(n)
	h.fresh += int64(n)
	if h.received >= progressBytes {
		h.failures = 0
	}
}

// failed records why a host did not serve the blob or its rest. A stall takes the whole timeout, so
// two stalls in a row end the use of the host.
func (l *blobHosts) failed(h *blobHost, err error) {
	h.err = err
	h.noteDown(err)
	var u *UnavailableError
	if !errors.As(err, &u) || !u.temporary {
		h.out = true
		if isCorrupt(err) {
			l.repo.noteWrong(h.endpoint, l.blob)
		}
		return
	}
	if h.failures == 0 {
		h.received = 0
	}
	h.failures++
	stalls := h.failures > 1 && h.fresh < leastBytes && errors.Is(err, fair.ErrStalled)
	h.out = stalls || h.failures == maxFailures
	h.fresh = 0
	h.ready = time.Now().Add(l.repo.delay(h.failures, u.after))
}

// error returns the last failures of all hosts. The error of the last host decides the code.
func (l *blobHosts) error() error {
	var failed []error
	for _, h := range l.all {
		failed = append(failed, atHost(h.String(), h.err))
	}
	return l.repo.failure(failed)
}

// senders names the hosts that have sent the blob, for errors.
func (l *blobHosts) senders() string {
	var names []string
	for _, h := range l.all {
		if h.served {
			names = append(names, h.String())
		}
	}
	return strings.Join(names, ", ")
}

// wrongBlob is a blob and a host that has sent wrong content for it.
type wrongBlob struct {
	host *endpoint
	blob digest.Digest
}

func (r *Repository) noteWrong(e *endpoint, blob digest.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.wrong == nil {
		r.wrong = map[wrongBlob]bool{}
	}
	r.wrong[wrongBlob{e, blob}] = true
}

func (r *Repository) isWrong(e *endpoint, blob digest.Digest) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.wrong[wrongBlob{e, blob}]
}

// Attempts returns how often the caller may fetch a blob whose content was corrupt, each time with
// another first host. It is 0 if each host is known to have a wrong blob. If the content came in
// pieces, it is unknown which host was wrong. So each host may be asked twice. Hosts that are known
// to be wrong are left out.
func (r *Repository) Attempts(blob digest.Digest, inPieces bool) int {
	places := r.hosts(capPull, 0)
	switch {
	case !slices.ContainsFunc(places, func(e *endpoint) bool { return !r.isWrong(e, blob) }):
		return 0
	case inPieces:
		return 2 * len(places)
	}
	return len(places)
}

// failure returns the error of a request that all hosts have failed to serve. The error of the last
// host decides the code; the text names the others before it.
func (r *Repository) failure(failed []error) error {
	if len(failed) == 0 {
		return errdefs.FailedPrecondition("no host of %s serves this request", r.ref.Domain)
	}
	err := failed[len(failed)-1]
	for i := len(failed) - 2; i >= 0; i-- {
		err = fmt.Errorf("%v; %w", failed[i], err)
	}
	return err
}
