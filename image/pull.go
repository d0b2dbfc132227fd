package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image/erofs"
	"berth/image/layer"
	"berth/image/partial"
	"berth/image/registry"
	"berth/image/tree"
	"berth/image/trust"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/trace"
)

// Pull fetches the image that ref names and records it under that name. It asks the registry even
// if the image is present, because the registry controls the access and the tag's target. auth may
// be nil. Errors are documented in package registry; the package documentation describes the error
// of an unavailable registry and of a rejected signature.
func (s *Store) Pull(ctx context.Context, ref string, auth *runtimeapi.AuthConfig) (*Image, error) {
	return s.PullFor(ctx, "", ref, auth)
}

// PullFor is Pull for a pod in a namespace, which may have a signature policy of its own.
func (s *Store) PullFor(ctx context.Context, namespace, ref string, auth *runtimeapi.AuthConfig) (*Image, error) {
	track, err := s.pulls.start(ref)
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	defer s.pulls.end(track)
	defer s.governor.Begin()()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	img, err := s.pull(ctx, namespace, ref, auth, track)
	result := track.result(err)
	s.cfg.Observer.Pulled(track.registry, result)
	if err != nil {
		return nil, pullError(ref, err)
	}
	if result.Lazy == 0 && track.fromPeers() == 0 {
		s.rates.observe(track.registry, track.received(), result.Took)
	}
	s.log.Info("image pulled", "ref", ref, "image", img.ID, "size", img.Size, "host", strings.Join(track.hosts, ","),
		"bytes", track.received(), "peerBytes", track.fromPeers(),
		"seconds", math.Round(time.Since(track.started).Seconds()*1000)/1000)
	return img, nil
}

// pullError gives the error of a failed pull the form that kubelet expects.
func pullError(ref string, err error) error {
	var down *registry.UnavailableError
	if errors.As(err, &down) {
		return errdefs.New(codes.Unknown, "%w: pull %s: %w", crierrors.ErrRegistryUnavailable, ref, err)
	}
	var rejected *trust.RejectedError
	if errors.As(err, &rejected) {
		return signatureError("pull "+ref, err)
	}
	return fmt.Errorf("pull %s: %w", ref, err)
}

func (s *Store) pull(ctx context.Context, namespace, name string, auth *runtimeapi.AuthConfig,
	track *pullTrack) (*Image, error) {
	candidates, err := s.client.Candidates(name)
	if err != nil {
		return nil, err
	}
	credentials, err := registry.FromCRI(auth)
	if err != nil {
		return nil, err
	}
	return registry.FirstOf(candidates, func(ref registry.Reference) (*Image, error) {
		return s.pullReference(ctx, namespace, ref, credentials, track)
	})
}

// pullReference pulls the image that a complete reference names.
func (s *Store) pullReference(ctx context.Context, namespace string, ref registry.Reference,
	credentials registry.Credentials, track *pullTrack) (*Image, error) {
	track.registry = ref.Domain
	repo, err := s.client.Open(ref, credentials)
	if err != nil {
		return nil, err
	}
	defer repo.Close()
	defer func() { track.hosts = repo.Served() }()
	resolving := trace.Begin(ctx, "resolve")
	end := s.cfg.Waits.BeginOpen("registry manifest", "image "+ref.String()) // stalled transfers end, so no deadline
	if img := s.unchanged(ctx, repo); img != nil && s.signatures.mayReuse(ctx, namespace, ref, img.ID) {
		end()
		resolving.End()
		s.offer(repo, img.Layers...)
		return img, nil
	}
	resolved, err := repo.Resolve(ctx, s.cfg.Platform)
	end()
	resolving.End()
	if err != nil {
		return nil, err
	}
	if err := checkSizes(resolved.Layers, s.cfg.Limits); err != nil {
		return nil, err
	}
	checking := trace.Begin(ctx, "check signatures")
	evidence, err := s.signatures.checkPull(ctx, namespace, repo, resolved)
	checking.End()
	if err != nil {
		return nil, err
	}
	img, err := s.fetch(ctx, repo, resolved, track.setLayers(resolved.Layers))
	if err != nil {
		return nil, err
	}
	return img, s.signatures.keep(img.ID, evidence)
}

// checkSizes rejects an image with a blob larger than any valid tar. Decompressors skip most bytes
// of such a blob, so no other limit applies.
func checkSizes(layers []registry.Layer, limits unpack.Limits) error {
	slack := limits.Tar>>6 + 1<<20 // overhead of compressing incompressible data, and an index
	for i, l := range layers {
		if l.Blob.Size-slack > limits.Tar {
			return errdefs.FailedPrecondition(
				"layer %d: blob %s has %d bytes, more than the %d allowed for an unpacked layer", i, l.Blob.Digest, l.Blob.Size, limits.Tar)
		}
	}
	return nil
}

// unchanged returns the present image of the repository's reference if a HEAD request confirms its
// digest, else nil. HEAD does not count against registries' pull limits.
func (s *Store) unchanged(ctx context.Context, repo *registry.Repository) *Image {
	ref := repo.Reference()
	if s.index.Load().byName[ref.String()] == nil {
		return nil
	}
	d := repo.Digest(ctx)
	x := s.index.Load() // the image may be gone since, or the tag moved
	img := x.byName[ref.String()]
	if d == "" || x.byName[ref.WithDigest(d)] != img {
		return nil
	}
	return img
}

// fetch downloads the missing layers and commits the image.
func (s *Store) fetch(ctx context.Context, repo *registry.Repository, img *registry.Image,
	tracks []*layerTrack) (*Image, error) {
	a := s.accesses.begin(repo, layersOf(img))
	defer a.end()
	ref := repo.Reference()
	plan := s.planLazy(ctx, s.layers.storeFor(distinct(layersOf(img))), img, repo)
	added, err := s.fetchBy(ctx, a, img, plan, tracks)
	unusable := mayBeIndexes(err) && plan.usesTables()
	if errors.Is(err, errFailedLayer) || unusable {
		s.log.Warn("image is fetched whole", "image", ref.String(), "error", err)
		before := plan.layers
		plan.layers = make([]lazyDecision, len(img.Layers))
		for i := range plan.layers {
			plan.layers[i].reason = "an index was wrong"
		}
		added, err = s.fetchBy(ctx, a, img, plan, tracks)
		if err == nil && unusable {
			s.avoidTables(img, before)
		}
	}
	return added, err
}

// mayBeIndexes reports whether wrong indexes of layers can have made a pull fail.
func mayBeIndexes(err error) bool {
	return errors.Is(err, tree.ErrMalformed) || errors.Is(err, layer.ErrTooLarge)
}

// avoidTables keeps the tables of contents with which a pull has failed from being used again. The
// same image could be fetched whole.
func (s *Store) avoidTables(img *registry.Image, decided []lazyDecision) {
	for i, d := range decided {
		if d.lazily && d.table {
			s.falseTables.add(img.Layers[i].Blob.Digest, tableOf(img.Layers[i]))
		}
	}
}

// fetchBy is fetch with a plan.
func (s *Store) fetchBy(ctx context.Context, a *access, img *registry.Image, plan *lazyPlan,
	tracks []*layerTrack) (*Image, error) {
	ref := a.repo.Reference()
	return s.add(ctx, ref.String(), img, naming{refs: []registry.Reference{ref}, registry: ref.Domain},
		func(ctx context.Context, store *layer.Store, i int) error {
			if err := s.fetchLayer(ctx, store, a, img.Layers[i], plan, i, tracks[i]); err != nil {
				return err
			}
			if *tracks[i].state.Load() == LayerDone {
				s.keepFinished(ref, img.Layers[i])
			}
			return nil
		})
}

// getLayer ensures that layer i of an image is in a store and that the image may use it.
type getLayer func(ctx context.Context, store *layer.Store, i int) error

// add gets the layers of an image and commits it. After a failure it deletes the layers that
// nothing else needs, except those that keepFinished has kept.
func (s *Store) add(ctx context.Context, what string, img *registry.Image, names naming,
	get getLayer) (added *Image, err error) {
	chain := layersOf(img)
	owner := fmt.Sprintf("%s%d", pullPrefix, s.pullID.Add(1))
	end := s.cfg.Waits.Begin("layer deletion", "image "+what)
	err = s.refs.acquire(ctx, owner, chain)
	end()
	if err != nil {
		return nil, err
	}
	defer func() {
		s.refs.release(owner)
		if _, err := s.sweep(nil); err != nil {
			s.log.Warn("delete unused layers after pull", "image", what, "error", err)
		}
	}()
	store := s.layers.storeFor(distinct(chain))
	if other := s.layers.fallback(store); other != nil && missing(store, img) > 0 &&
		other.Inodes(distinct(chain)) > s.mostInodes() {
		store = other // the present layers alone are too large to merge: fetch the missing ones as directories at once
	}
	err = s.addLayers(ctx, store, img, get)
	if other := s.layers.fallback(store); other != nil && errors.Is(err, layer.ErrTooLarge) {
		s.log.Info("image is too large for a layer driver, trying another", "image", what, "from",
			store.Kind(), "to", other.Kind(), "error", err)
		store = other
		err = s.addLayers(ctx, store, img, get)
	}
	if err == nil {
		recording := trace.Begin(ctx, "record")
		added, err = s.commit(ctx, names, img, store)
		recording.End()
	}
	s.settleFinished(names.refs, chain, err)
	return added, err
}

// usualFile is the memory for merging one file: its node, its name and its directory entry. 140,000
// files fill erofs.MaxMemory.
const usualFile = tree.NodeMemory + 32

// mostInodes returns how many usual files of EROFS layers can be merged. The caller's count
// includes files that upper layers hide, so some images are stored as directories without need.
func (s *Store) mostInodes() uint64 {
	return uint64(cmp.Or(s.cfg.MergeMemory, erofs.MaxMemory)) / usualFile
}

// addLayers gets the layers that a store lacks and checks that they can be stacked.
func (s *Store) addLayers(ctx context.Context, store *layer.Store, img *registry.Image, get getLayer) error {
	if wanted := missing(store, img); wanted > 0 {
		if err := store.HasRoom(wanted, s.layers.deleting()); err != nil {
			return err
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(s.cfg.MaxParallelDownloads)
	for i, l := range img.Layers {
		group.Go(func() error {
			return task.Guard(s.log, "pull", "layer "+l.DiffID.String(), func() error { return get(groupCtx, store, i) })
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if chain := layersOf(img); len(chain) > 0 { // a layer that does not fit those below fails the pull here
		defer trace.Begin(ctx, "stack layers").End()
		if _, err := store.Stack(ctx, distinct(chain)); err != nil {
			return fmt.Errorf("stack layers: %w", err)
		}
	}
	return nil
}

// missing returns the size of the blobs to download for an image. The layers take more space on
// disk. The check before the download prevents repeated pulls of an image that does not fit.
func missing(store *layer.Store, img *registry.Image) (bytes uint64) {
	counted := map[digest.Digest]bool{}
	for _, l := range img.Layers {
		if name := sourceOf(l).Name(); !counted[name] && !store.Has(name) {
			counted[name] = true
			bytes += uint64(l.Blob.Size)
		}
	}
	return bytes
}

// sourceOf returns the digests that a layer is made from.
func sourceOf(l registry.Layer) layer.Source {
	return layer.Source{Blob: l.Blob.Digest, DiffID: l.DiffID}
}

// layersOf returns the names of an image's layers in the layer store, bottom first.
func layersOf(img *registry.Image) []digest.Digest {
	names := make([]digest.Digest, 0, len(img.Layers))
	for _, l := range img.Layers {
		names = append(names, sourceOf(l).Name())
	}
	return names
}

// fetchLayer ensures that a layer is present and that the pull may use it. Concurrent pulls may
// share the download.
func (s *Store) fetchLayer(ctx context.Context, store *layer.Store, a *access, l registry.Layer, plan *lazyPlan, i int,
	track *layerTrack) error {
	ctx, span := trace.Nest(ctx, "layer "+l.Blob.Digest.Encoded()[:12])
	defer span.End()
	name := sourceOf(l).Name()
	if err := s.retire(store, sourceOf(l)); err != nil {
		return err
	}
	if store.Has(name) {
		return s.usePresent(ctx, a, l, plan, track)
	}
	if plan.isLazy(store, i) {
		created, err := s.getLazily(ctx, store, a, l, plan.layers[i])
		if errors.Is(err, layer.ErrThere) {
			return s.usePresent(ctx, a, l, plan, track)
		}
		if err != nil {
			track.set(LayerLazy)
			return err
		}
		if created {
			track.set(LayerLazy)
			return s.useIncomplete(ctx, a, l, plan) // another pull may have created it, from a table
		}
	} else if reason := plan.layers[i].reason; s.incomplete.cfg.Policy != LazyOff {
		s.incomplete.decided(name, "fetched whole: "+reason)
	}
	key := flightKey{domain: a.repo.Reference().Domain, blob: l.Blob.Digest, diffID: l.DiffID, kind: store.Kind()}
	err := s.share(ctx, a, key, l, track, func(ctx context.Context, received *transfer) error {
		return s.downloadShared(ctx, store, a, l, received)
	})
	if err != nil || store != plan.store { // the layer in another store is whole
		return err
	}
	return s.useIncomplete(ctx, a, l, plan)
}

// share downloads a layer with run, or waits for another pull's download of the same layer. If the
// other download fails, share starts its own. A successful download grants the pull access to the
// layer.
func (s *Store) share(ctx context.Context, a *access, key flightKey, l registry.Layer, track *layerTrack,
	run func(context.Context, *transfer) error) error {
	name, ref := sourceOf(l).Name(), a.repo.Reference()
	// Stalled transfers end, so no deadline.
	defer s.cfg.Waits.BeginOpen("layer download and unpack", "layer "+l.DiffID.String())()
	for {
		by, started, err := s.flights.join(ctx, key, ref, track.downloading,
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
			return s.use(ctx, a, l, max(nameOrigin(ref, by.String()), s.originOf(a, name)), track)
		case started || ctx.Err() != nil:
			return fmt.Errorf("layer %s: %w", l.Blob.Digest, err)
		}
	}
}

// download fetches and stores a layer.
func (s *Store) download(ctx context.Context, store *layer.Store, repo *registry.Repository, l registry.Layer,
	received *transfer) error {
	return s.fromHosts(repo, l, received, func(host int) (inPieces bool, err error) {
		for more := (shortage{}); ; received.reset() {
			had, inPieces, err := s.downloadFrom(ctx, store, repo, l, host, received, more)
			if !more.grow(s.memory, had, err) {
				return inPieces, err
			}
			s.log.Info("fetching layer again to unpack it with more memory", "image", repo.Reference().String(), "layer",
				l.Blob.Digest, "error", err)
		}
	})
}

// fromHosts calls fetch with the number of a repository's host. After corrupt content it tries the
// next host, because a mirror's cache may be damaged. If the only host sent the layer in pieces, it
// retries the layer as a whole.
func (s *Store) fromHosts(repo *registry.Repository, l registry.Layer, received *transfer,
	fetch func(host int) (inPieces bool, err error)) error {
	for first := 0; ; first++ {
		received.reset()
		inPieces, err := fetch(first)
		if errdefs.Code(err) != codes.DataLoss || first+1 >= repo.Attempts(l.Blob.Digest, inPieces) {
			return err
		}
		s.log.Warn("layer is corrupt", "image", repo.Reference().String(), "layer", l.Blob.Digest, "error", err)
	}
}

// downloadFrom streams a layer from the network through its checks into the layer store, starting
// with the given host. It returns the limits of the layer and whether it came in pieces.
func (s *Store) downloadFrom(ctx context.Context, store *layer.Store, repo *registry.Repository, l registry.Layer,
	first int, received *transfer, more shortage) (had unpack.Limits, inPieces bool, err error) {
	blob, err := repo.Blob(ctx, l.Blob, first, func(n int) {
		received.at.Add(int64(n))
		s.cfg.Observer.Received(repo.Reference().Domain, n)
	})
	if err != nil {
		return had, false, err
	}
	defer blob.Close() // read to its end or abandoned
	kept := s.openKept(blob, repo, l, first, received)
	defer func() { endKept(kept, err) }()
	points := s.indexer.begin(store, l)
	if points.File != nil {
		blob.NoteStates()
	}
	defer func() { s.indexer.end(store, repo.Reference().Domain, l, points, blob, err) }()
	reading, stop := context.WithCancel(ctx)
	defer stop()
	traced := &tracedBlob{Blob: blob, ctx: reading, stop: stop, kept: kept, slow: s.slow}
	had, err = s.unpack(ctx, store, repo.Reference().Domain, l, traced, points, more)
	traced.span.End()
	if err == nil { // unread if another pull created the layer meanwhile
		_, err = io.Copy(io.Discard, blob)
	}
	inPieces = blob.InPieces()
	switch again := more; {
	case again.grow(s.memory, had, err):
	case errors.Is(err, layer.ErrTooLarge) && s.layers.fallback(store) != nil: // the other driver reads the whole blob
	case blob.Resumed() && mayBeOfKept(err): // fetch it as a whole
		err = errdefs.New(codes.DataLoss, "%w, with bytes from an earlier transfer", err)
	case !rejectsContent(err):
	case repo.Hosts() > 1 || inPieces:
		err = faultOf(ctx, blob, err, faultTime)
	case blob.Left() <= littleLeft:
		err = faultOf(ctx, blob, err, littleTime)
	}
	return had, inPieces, err
}

// tracedBlob is a blob whose transfer is a span: from the first read to the end or an error. It
// keeps what it reads until the end, and waits for the limit of all pulls.
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

// slow waits until the pulls may receive more than n further bytes.
func (s *Store) slow(ctx context.Context, n int) error {
	waited, err := s.governor.Wait(ctx, n)
	if waited > 0 {
		s.cfg.Observer.Slowed(waited)
	}
	return err
}

// unpack stores a layer when an unpack slot and memory are free. origin is the registry, or another
// name for the source of blobs that shares the slots. It returns the limits of the layer.
func (s *Store) unpack(ctx context.Context, store *layer.Store, origin string, l registry.Layer, blob io.Reader,
	points layer.Points, more shortage) (had unpack.Limits, err error) {
	return s.whenFree(ctx, origin, l, more, func(limits unpack.Limits) error {
		if l.File != "" {
			return store.CreateFile(ctx, sourceOf(l), layer.File{Path: l.File, Size: l.Blob.Size, Content: blob}, limits)
		}
		return store.CreateWithPoints(ctx, sourceOf(l), blob, limits, points)
	})
}

// whenFree calls make with the limits of a layer, while it holds an unpack slot of origin and
// memory. It returns these limits.
func (s *Store) whenFree(ctx context.Context, origin string, l registry.Layer, more shortage,
	make func(unpack.Limits) error) (had unpack.Limits, err error) {
	waiting := trace.Begin(ctx, "wait for unpack slot")
	defer waiting.End() // after an error
	err = s.withSlot(ctx, origin, func() error {
		waiting.End()
		defer trace.Begin(ctx, "unpack").End()
		limits, release, err := s.withMemory(ctx, l, more)
		if err != nil {
			return err
		}
		defer release()
		had = limits
		return make(limits)
	})
	return had, err
}

// withMemory returns the limits of a layer with its share of the unpack memory. It waits if an
// earlier attempt needed more.
func (s *Store) withMemory(
	ctx context.Context, l registry.Layer, more shortage,
) (_ unpack.Limits, release func(), err error) {
	limits := s.cfg.Limits
	if more == (shortage{}) {
		limits, release = s.memory.share(limits)
		return limits, release, nil
	}
	defer s.cfg.Waits.BeginOpen("unpack memory", "layer "+l.DiffID.String())()
	return s.memory.wait(ctx, limits, more)
}

// withSlot calls make while it holds an unpack slot of the registry.
func (s *Store) withSlot(ctx context.Context, domain string, make func() error) error {
	release, err := s.slots.Acquire(ctx, domain)
	if err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	defer release()
	return make()
}

// rejectsContent reports whether an error is due to the content of a layer.
func rejectsContent(err error) bool {
	switch unpack.CodeOf(err) {
	case unpack.FailedPrecondition, unpack.MoreMemory, unpack.MoreWindow:
		return true
	}
	return errdefs.Code(err) == codes.InvalidArgument || errors.Is(err, layer.ErrTooLarge)
}

// mayBeOfKept reports whether bytes from an earlier transfer may have caused an error, also by
// ending berth-unpack. A registry that fails or refuses, and a cancelled pull, have other causes.
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
	// faultTime limits the time to read the rest of a rejected blob if another host or attempt may
	// succeed.
	faultTime = time.Minute
	// If at most littleLeft bytes are unread, littleTime limits the time to read them. Without this
	// the error of a truncated blob would depend on timing.
	littleLeft = 4 << 20
	littleTime = 3 * time.Second
)

// faultOf reads the rest of a blob whose layer was rejected. If the digest is wrong, it returns
// that error instead: damage in a host's cache may first show as an invalid tar. It needs no slot
// because it unpacks nothing.
func faultOf(ctx context.Context, blob *registry.Blob, refused error, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	blob.Resume() // the unpacker may have stopped it
	defer context.AfterFunc(ctx, blob.Stop)()
	if _, err := io.Copy(io.Discard, blob); errdefs.Code(err) == codes.DataLoss {
		return err
	}
	return refused
}
