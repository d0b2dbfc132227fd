package pull

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"berth/image"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/registry"
	"berth/internal/trace"
)

// layerFetch ensures that one layer of an image is present, and that the pull may use it.
type layerFetch struct {
	p      *Puller
	store  *layer.Store
	access *access
	layer  registry.Layer
	plan   *lazy.Plan
	number int  // of the layer in plan
	pinned bool // the image must not depend on its registry
	track  *layerTrack
}

func (f *layerFetch) name() digest.Digest { return lazy.SourceOf(f.layer).Name() }

// get uses a present layer, creates it from an index, or fetches it whole. Concurrent pulls may
// share the download.
func (f *layerFetch) get(ctx context.Context) error {
	ctx, span := trace.Nest(ctx, "layer "+f.layer.Blob.Digest.Encoded()[:12])
	defer span.End()
	if err := f.p.lazy.Retire(f.store, lazy.SourceOf(f.layer)); err != nil {
		return err
	}
	if f.store.Has(f.name()) {
		return f.reuse(ctx)
	}
	lazily, reason := f.plan.Lazily(f.store, f.number)
	if lazily {
		created, err := f.fetchLazily(ctx)
		if created || err != nil {
			return err
		}
	} else if f.p.lazy.Enabled() {
		f.p.lazy.Decided(f.name(), "fetched whole: "+reason)
	}
	return f.fetchWhole(ctx)
}

// reuse ensures that the pull may use a present layer.
func (f *layerFetch) reuse(ctx context.Context) error {
	if err := f.p.use(ctx, f.access, f.layer, f.p.originOf(f.access, f.name()), f.track); err != nil {
		return err
	}
	return f.await(ctx)
}

// fetchLazily creates the layer from an index. It returns false if the layer must be fetched whole.
func (f *layerFetch) fetchLazily(ctx context.Context) (created bool, err error) {
	created, err = f.p.lazy.Create(ctx, f.plan, f.number, f.layer, f.access.repo)
	switch {
	case errors.Is(err, layer.ErrThere):
		return true, f.reuse(ctx)
	case created:
		f.access.grant(f.name())
		f.track.set(LayerLazy)
		return true, f.await(ctx) // another pull may have created the layer from a table
	case err != nil:
		f.track.set(LayerLazy)
	}
	return false, err
}

// fetchWhole downloads the layer, or waits for the download of another pull.
func (f *layerFetch) fetchWhole(ctx context.Context) error {
	key := flightKey{domain: f.access.repo.Reference().Domain, blob: f.layer.Blob.Digest, diffID: f.layer.DiffID,
		kind: f.store.Kind()}
	err := f.p.share(ctx, f.access, key, f.layer, f.track, func(ctx context.Context, received *transfer) error {
		return f.p.download(ctx, f.store, f.access, f.layer, received)
	})
	if err != nil || f.store.Lazy(f.name()) == nil {
		return err
	}
	return f.await(ctx) // another pull has created the layer lazily meanwhile
}

// await lets an incomplete layer ask the pull's registry with the pull's credentials from now on.
// It waits until the layer is complete if the image must be whole. It also waits if another pull
// has created the layer from a table of contents that this pull must not trust.
func (f *layerFetch) await(ctx context.Context) error {
	foreign := f.p.lazy.IsForeign(f.store, f.layer, f.access.repo.Reference().Domain)
	f.p.lazy.Offer(f.access.repo, f.name())
	if f.pinned || foreign {
		return f.p.lazy.Await(ctx, []digest.Digest{f.name()})
	}
	return nil
}

// share downloads a layer with run, or waits for another pull's download of the same layer. If the
// other download fails, share starts its own. A successful download grants the pull access to the
// layer.
func (p *Puller) share(ctx context.Context, a *access, key flightKey, l registry.Layer, track *layerTrack,
	run func(context.Context, *transfer) error) error {
	// Stalled transfers end, so no deadline.
	defer p.cfg.Waits.BeginOpen("layer download and unpack", "layer "+l.DiffID.String())()
	err := p.retry(ctx, "layer "+l.Blob.Digest.String(), attempt{}, func(attempt) (options, error) {
		return options{shared: true}, p.joinOnce(ctx, a, key, l, track, run)
	})
	var shared *sharedError
	if errors.As(err, &shared) { // retry gives up after another pull's failure only if ctx has ended
		err = context.Cause(ctx)
	}
	return err
}

// joinOnce is share for one download.
func (p *Puller) joinOnce(ctx context.Context, a *access, key flightKey, l registry.Layer, track *layerTrack,
	run func(context.Context, *transfer) error) error {
	name, ref := lazy.SourceOf(l).Name(), a.repo.Reference()
	by, started, err := p.flights.join(ctx, key, ref, track.downloading,
		func(flight context.Context, received *transfer) error {
			defer a.repo.Close()
			flight, release := trace.Carry(flight, ctx)
			defer release()
			err := run(flight, received)
			if err == nil {
				a.grant(name)
			}
			return err
		})
	switch {
	case err == nil && started:
		track.set(LayerDone)
		return nil
	case err == nil:
		return p.use(ctx, a, l, max(image.OriginOf(ref, by.String()), p.originOf(a, name)), track)
	case started || ctx.Err() != nil:
		return fmt.Errorf("layer %s: %w", l.Blob.Digest, err)
	}
	return &sharedError{err}
}
