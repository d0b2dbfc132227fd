package pull

import (
	"context"
	"errors"
	"io"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/partial"
	"berth/image/peers"
	"berth/image/registry"
	"berth/image/unpack"
	"berth/image/unpack/budget"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// download is the transfer of one whole layer, from peers or from the registry.
type download struct {
	p        *Puller
	ctx      context.Context // of the transfer, which pulls may share
	store    *layer.Store
	access   *access
	layer    registry.Layer
	received *transfer

	key    peers.Key
	others *peers.Peers    // nil: no peer is asked
	search *peers.Search   // nil before the first question
	end    func(have bool) // ends the announcement to peers; nil: not announced
}

// download fetches and stores a layer, in as many attempts as it takes, and tells peers that this
// node has it.
func (p *Puller) download(ctx context.Context, store *layer.Store, a *access, l registry.Layer,
	received *transfer) (err error) {
	d := &download{p: p, ctx: ctx, store: store, access: a, layer: l, received: received, others: p.peers.Load(),
		key: peers.Key{Registry: a.repo.Reference().Domain, Blob: l.Blob.Digest, DiffID: l.DiffID}}
	if l.File != "" { // files of artifacts have no tar with a known digest
		d.others = nil
	}
	have := false
	defer func() { // also after a panic
		if d.end != nil {
			d.end(have)
		}
	}()
	if err := p.retry(ctx, "layer "+l.Blob.Digest.String()+" of "+a.repo.Reference().String(),
		attempt{registry: d.others == nil}, d.try); err != nil {
		return err
	}
	a.grant(lazy.SourceOf(l).Name()) // before peers ask for it
	have = true
	if d.others != nil && d.end == nil { // a peer has sent it
		d.others.Have(d.key)
	}
	return nil
}

// try is one attempt.
func (d *download) try(at attempt) (options, error) {
	d.received.reset()
	if !at.registry {
		return d.fromPeer(at)
	}
	if d.others != nil && d.end == nil {
		d.end = d.others.Begin(d.key, d.received.at.Load)
	}
	return d.fromRegistry(at)
}

// fromRegistry streams a layer from the registry through berth-unpack into the layer store.
func (d *download) fromRegistry(at attempt) (left options, err error) {
	p, repo, l := d.p, d.access.repo, d.layer
	blob, err := repo.Blob(d.ctx, l.Blob, at.host, func(n int) {
		d.received.at.Add(int64(n))
		p.cfg.Observer.Received(repo.Reference().Domain, n)
	})
	if err != nil {
		return left, err
	}
	defer blob.Close() // read to its end or abandoned
	kept := d.openKept(blob, at)
	defer func() { endKept(kept, err) }()
	points := p.lazy.BeginIndex(d.store, l)
	if points.File != nil {
		blob.NoteStates()
	}
	defer func() { p.lazy.EndIndex(d.store, repo.Reference().Domain, l, points, blob, err) }()
	reading, stop := context.WithCancel(d.ctx)
	defer stop()
	traced := &tracedBlob{Blob: blob, ctx: reading, stop: stop, kept: kept, slow: p.slow}
	had, err := p.unpack(d.ctx, d.store, repo.Reference().Domain, l, traced, points, at.more)
	traced.span.End()
	if err == nil { // unread if another pull created the layer meanwhile
		_, err = io.Copy(io.Discard, blob)
	}
	var grows bool
	left.more, grows = p.budget.Grow(at.more, had, err)
	if !grows {
		err = d.blame(blob, err)
	}
	left.hosts = repo.Attempts(l.Blob.Digest, blob.InPieces())
	return left, err
}

// blame returns the error of a transfer whose layer was rejected. If the content of the blob is
// wrong, it returns DataLoss in place of the layer's error, because another host or attempt may
// then succeed.
func (d *download) blame(blob *registry.Blob, err error) error {
	switch {
	case errors.Is(err, layer.ErrTooLarge) && d.p.store.Fallback(d.store) != nil: // the other driver reads the whole blob
		return err
	case blob.Resumed() && mayBeOfKept(err): // fetch it as a whole, whatever the cause
		return errdefs.New(codes.DataLoss, "%v, with bytes from an earlier transfer", err)
	case !layer.RejectsContent(err):
		return err
	case d.access.repo.Hosts() > 1 || blob.InPieces():
		return readRest(d.ctx, blob, err, restTimeout)
	case blob.Left() <= littleLeft:
		return readRest(d.ctx, blob, err, littleTimeout)
	}
	return err
}

// openKept opens the kept bytes of the layer, and lets the blob begin with them. After corrupt
// content it keeps nothing.
func (d *download) openKept(blob *registry.Blob, at attempt) *partial.Blob {
	if at.host > 0 {
		return nil
	}
	repo, l := d.access.repo, d.layer
	kept := d.p.store.OpenPartial(repo.Reference().Name(), l.Blob)
	content, size := kept.Had()
	if size > 0 {
		d.p.log.Info("resuming layer", "image", repo.Reference().String(), "layer", l.Blob.Digest, "bytes", size,
			"of", l.Blob.Size)
		d.received.at.Add(size)
		d.received.kept.Add(size)
		blob.ResumeFrom(content, size)
	}
	return kept
}

// endKept keeps the received bytes of a layer whose download has failed, if they may be of use.
func endKept(kept *partial.Blob, err error) {
	if image.IsResumable(err) {
		kept.Keep()
	} else {
		kept.Discard()
	}
}

// tracedBlob is a blob whose transfer is a span: from the first read to the end or an error. It
// keeps the read bytes on disk until the end, and waits for the limit of all pulls.
type tracedBlob struct {
	*registry.Blob
	ctx  context.Context // of the span and of slow
	stop context.CancelFunc
	span *trace.Span // nil before the first read
	kept *partial.Blob
	slow func(ctx context.Context, n int) error
}

func (b *tracedBlob) Read(p []byte) (int, error) {
	if b.span == nil {
		b.span = trace.Begin(b.ctx, "download")
	}
	n, err := b.Blob.Read(p)
	b.kept.Received(p[:n])
	if err == io.EOF { //nolint:errorlint // io.Reader
		b.kept.Discard() // before the layer is synced, so that these bytes need not be written
	}
	if err == nil {
		err = b.slow(b.ctx, n)
	}
	if err != nil {
		b.span.End()
	}
	return n, err
}

// Stop implements unpack.Stopper. It also ends a wait for the limit of all pulls.
func (b *tracedBlob) Stop() {
	b.stop()
	b.Blob.Stop()
}

// unpack stores a layer when an unpack slot and memory are free. origin is the registry, or another
// name for a source of blobs: slots are shared among origins. It returns the limits of the layer.
func (p *Puller) unpack(ctx context.Context, store *layer.Store, origin string, l registry.Layer, blob io.Reader,
	points layer.Points, more budget.Shortage) (had unpack.Limits, err error) {
	return p.budget.Run(ctx, origin, "layer "+l.DiffID.String(), more, func(limits unpack.Limits) error {
		if l.File != "" {
			return store.CreateFile(ctx, lazy.SourceOf(l), layer.File{Path: l.File, Size: l.Blob.Size, Content: blob}, limits)
		}
		return store.CreateWithPoints(ctx, lazy.SourceOf(l), blob, limits, points)
	})
}

// mayBeOfKept reports whether bytes from an earlier transfer may have caused an error. They may
// even have crashed berth-unpack. A registry that fails or refuses, and a cancelled pull, have
// other causes.
func mayBeOfKept(err error) bool {
	switch errdefs.Code(err) {
	case codes.OK, codes.PermissionDenied, codes.Unauthenticated, codes.NotFound:
		return false
	}
	var down *registry.UnavailableError
	return !errors.As(err, &down) && !errors.Is(err, context.Canceled) &&
		!errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, unix.ENOSPC)
}

const (
	// restTimeout limits the time to read the rest of a rejected blob if another host or attempt
	// may succeed.
	restTimeout = time.Minute
	// If at most littleLeft bytes are unread, littleTimeout limits the time to read them. If these
	// bytes were not read, the error of a truncated blob would depend on timing.
	littleLeft    = 4 << 20
	littleTimeout = 3 * time.Second
)

// readRest reads the rest of a blob whose layer was rejected. If the digest is wrong, it returns
// DataLoss in place of refused. Damage in a host's cache may first appear as an invalid tar. It
// needs no slot because it unpacks nothing.
func readRest(ctx context.Context, blob *registry.Blob, refused error, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	blob.Resume() // the unpacker may have stopped it
	defer context.AfterFunc(ctx, blob.Stop)()
	if _, err := io.Copy(io.Discard, blob); errdefs.Code(err) == codes.DataLoss {
		return err
	}
	return refused
}
