package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image/erofs"
	"berth/image/layer"
	"berth/image/registry"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/task"
)

// Pull fetches the image that ref names and records it under that name. The
// registry is always asked, also for an image that is here: it decides who may
// have it, and what a tag stands for. auth may be nil.
//
// Errors: those of package registry; see the package doc about RegistryUnavailable.
func (s *Store) Pull(ctx context.Context, ref string, auth *runtimeapi.AuthConfig) (*Image, error) {
	track, err := s.pulls.start(ref)
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	defer s.pulls.end(track)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	img, err := s.pull(ctx, ref, auth, track)
	if err != nil {
		return nil, pullError(ref, err)
	}
	s.log.Info("image pulled", "ref", ref, "image", img.ID, "size", img.Size, "host", strings.Join(track.hosts, ","), "bytes", track.received(),
		"seconds", math.Round(time.Since(track.started).Seconds()*1000)/1000)
	return img, nil
}

// pullError gives a failed pull the form kubelet understands.
func pullError(ref string, err error) error {
	var down *registry.UnavailableError
	if errors.As(err, &down) {
		return errdefs.New(codes.Unknown, "%w: pull %s: %w", crierrors.ErrRegistryUnavailable, ref, err)
	}
	return fmt.Errorf("pull %s: %w", ref, err)
}

func (s *Store) pull(ctx context.Context, name string, auth *runtimeapi.AuthConfig, track *pullTrack) (*Image, error) {
	ref, err := registry.ParseReference(name)
	if err != nil {
		return nil, err
	}
	credentials, err := registry.FromCRI(auth)
	if err != nil {
		return nil, err
	}
	repo, err := s.client.Open(ref, credentials)
	if err != nil {
		return nil, err
	}
	defer repo.Close()
	defer func() { track.hosts = repo.Served() }()
	end := s.cfg.Waits.BeginOpen("its registry to tell what it is", "image "+ref.String()) // stalls are given up
	if img := s.unchanged(ctx, repo); img != nil {
		end()
		return img, nil
	}
	resolved, err := repo.Resolve(ctx, s.cfg.Platform)
	end()
	if err != nil {
		return nil, err
	}
	if err := checkSizes(resolved.Layers, s.cfg.Limits); err != nil {
		return nil, err
	}
	return s.fetch(ctx, repo, resolved, track.setLayers(resolved.Layers))
}

// checkSizes refuses an image with a blob that is longer than any tar may be: most of it would be what
// decompressors skip, which no other limit bounds.
func checkSizes(layers []registry.Layer, limits unpack.Limits) error {
	slack := limits.Tar>>6 + 1<<20 // what a compressed form of the incompressible takes, and an index in it
	for i, l := range layers {
		if l.Blob.Size-slack > limits.Tar {
			return errdefs.New(codes.ResourceExhausted, "layer %d: %s has %d bytes; a layer may have %d when it is unpacked", i, l.Blob.Digest, l.Blob.Size, limits.Tar)
		}
	}
	return nil
}

// unchanged returns the image that is known by the repository's reference if the
// registry says that it still stands for it. A HEAD does not count against the
// pull limits of registries.
func (s *Store) unchanged(ctx context.Context, repo *registry.Repository) *Image {
	ref := repo.Reference()
	if s.index.Load().byName[ref.String()] == nil {
		return nil
	}
	d := repo.Digest(ctx)
	x := s.index.Load() // the image may be gone since, or the tag another's
	img := x.byName[ref.String()]
	if d == "" || x.byName[ref.WithDigest(d)] != img {
		return nil
	}
	return img
}

// fetch gets the layers that are missing and commits the image. What it has
// fetched when it fails is deleted, unless somebody else needs it.
func (s *Store) fetch(ctx context.Context, repo *registry.Repository, img *registry.Image, tracks []*layerTrack) (*Image, error) {
	chain := layersOf(img)
	owner := fmt.Sprintf("%s%d", pullPrefix, s.pullID.Add(1))
	end := s.cfg.Waits.Begin("layers that are being deleted", "image "+repo.Reference().String())
	err := s.refs.acquire(ctx, owner, chain)
	end()
	if err != nil {
		return nil, err
	}
	defer func() {
		s.refs.release(owner)
		if _, err := s.sweep(nil); err != nil {
			s.log.Warn("delete unused layers after a pull", "image", repo.Reference().String(), "error", err)
		}
	}()
	a := s.accesses.begin(repo, chain)
	defer a.end()
	store := s.layers.home(distinct(chain))
	if other := s.layers.other(store); other != nil && missing(store, img) > 0 && other.Inodes(distinct(chain)) > s.mostInodes() {
		store = other // what is there of it was too much before, as of its last version: the rest would be fetched, and then all of it
	}
	err = s.fetchInto(ctx, store, a, img, tracks)
	if other := s.layers.other(store); other != nil && errors.Is(err, layer.ErrTooLarge) {
		s.log.Info("an image is too much for one driver of layers, and tried with another", "image", repo.Reference().String(), "not", store.Kind(), "driver", other.Kind(), "error", err)
		store = other
		err = s.fetchInto(ctx, store, a, img, tracks)
	}
	if err != nil {
		return nil, err
	}
	return s.commit(ctx, repo.Reference(), img, store)
}

// usualFile is what a file takes of the memory for merging, with its name and its part of its directory: 140,000 files take all of it.
const usualFile = tree.NodeMemory + 32

// mostInodes is how many usual files EROFS layers that are merged may have at most. Those of layers that hide
// each other's files are counted too often: then an image becomes directories that need not be.
func (s *Store) mostInodes() uint64 {
	return uint64(cmp.Or(s.cfg.MergeMemory, erofs.MaxMemory)) / usualFile
}

// fetchInto gets the layers of an image that a store lacks, and finds out whether they can be stacked.
func (s *Store) fetchInto(ctx context.Context, store *layer.Store, a *access, img *registry.Image, tracks []*layerTrack) error {
	if wanted := missing(store, img); wanted > 0 {
		if err := store.HasRoom(wanted, s.layers.deleting()); err != nil {
			return err
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(s.cfg.MaxParallelDownloads)
	for i, l := range img.Layers {
		group.Go(func() error {
			return task.Guard(s.log, "pull", "layer "+l.DiffID.String(), func() error { return s.fetchLayer(groupCtx, store, a, l, tracks[i]) })
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if chain := layersOf(img); len(chain) > 0 { // what the layers need of each other, so that it fails now if it does
		if _, err := store.Stack(ctx, distinct(chain)); err != nil {
			return fmt.Errorf("join the layers: %w", err)
		}
	}
	return nil
}

// missing is how many bytes of an image's layers are to be fetched. On disk they take more: whoever pulls
// an image again and again that does not fit shall not fetch it each time.
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

// sourceOf is what a layer is made from.
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

// fetchLayer makes sure that a layer is here and that the pull may use it, by a download that other
// pulls may share.
func (s *Store) fetchLayer(ctx context.Context, store *layer.Store, a *access, l registry.Layer, track *layerTrack) error {
	if name := sourceOf(l).Name(); store.Has(name) {
		return s.use(ctx, a, l, s.originOf(a, name), track)
	}
	key := flightKey{domain: a.repo.Reference().Domain, blob: l.Blob.Digest, diffID: l.DiffID, kind: store.Kind()}
	return s.share(ctx, a, key, l, track, func(ctx context.Context, received *atomic.Int64) error {
		return s.download(ctx, store, a.repo, l, received)
	})
}

// share runs a download that shows that the pull's registry has a layer, or waits for that of
// another pull. If that one fails, it runs its own.
func (s *Store) share(ctx context.Context, a *access, key flightKey, l registry.Layer, track *layerTrack, run func(context.Context, *atomic.Int64) error) error {
	name, ref := sourceOf(l).Name(), a.repo.Reference()
	defer s.cfg.Waits.BeginOpen("its bytes, and to be unpacked", "layer "+l.DiffID.String())() // stalls are given up
	for {
		by, started, err := s.flights.join(ctx, key, ref, track.downloading, func(ctx context.Context, received *atomic.Int64) error {
			defer a.repo.Close()
			err := run(ctx, received)
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
func (s *Store) download(ctx context.Context, store *layer.Store, repo *registry.Repository, l registry.Layer, received *atomic.Int64) error {
	return s.fromHosts(repo, l, received, func(host int) (inParts bool, err error) {
		for more := (lack{}); ; received.Store(0) {
			had, inParts, err := s.downloadFrom(ctx, store, repo, l, host, received, more)
			if !more.grow(s.memory, had, err) {
				return inParts, err
			}
			s.log.Info("layer is fetched again, to be unpacked with more memory", "image", repo.Reference().String(), "layer", l.Blob.Digest, "error", err)
		}
	})
}

// fromHosts fetches a layer from the hosts of a repository, by their numbers. If one host's content
// is corrupt the next one is asked: a mirror's cache may be damaged. If there is none, and some of
// it was fetched in parts, the same is asked for the whole.
func (s *Store) fromHosts(repo *registry.Repository, l registry.Layer, received *atomic.Int64, fetch func(host int) (inParts bool, err error)) error {
	var err error
	for first, tries := 0, repo.Hosts(); first < tries; first++ {
		received.Store(0)
		var inParts bool
		inParts, err = fetch(first)
		if errdefs.Code(err) != codes.DataLoss {
			return err
		}
		if inParts {
			tries = max(tries, 2)
		}
		s.log.Warn("layer is corrupt", "image", repo.Reference().String(), "layer", l.Blob.Digest, "error", err)
	}
	return err
}

// downloadFrom streams a layer from the network through its checks into the layer store, beginning
// with the host of the given number. It returns the limits that the layer had, and reports whether
// some of it was fetched in parts.
func (s *Store) downloadFrom(ctx context.Context, store *layer.Store, repo *registry.Repository, l registry.Layer, first int, received *atomic.Int64, more lack) (had unpack.Limits, inParts bool, err error) {
	blob, err := repo.Blob(ctx, l.Blob, first, func(n int) { received.Add(int64(n)) })
	if err != nil {
		return had, false, err
	}
	defer blob.Close() // read to its end or given up
	err = s.inTurn(ctx, repo.Reference().Domain, func() error {
		limits, giveBack, err := s.withMemory(ctx, l, more)
		if err != nil {
			return err
		}
		defer giveBack()
		had = limits
		return store.Create(ctx, sourceOf(l), blob, limits)
	})
	if err == nil { // if another pull has made it meanwhile, the blob was not read
		_, err = io.Copy(io.Discard, blob)
	}
	inParts = blob.InParts()
	switch again := more; {
	case again.grow(s.memory, had, err):
	case errors.Is(err, layer.ErrTooLarge) && s.layers.other(store) != nil: // which looks at the whole blob
	case !refusesContent(err):
	case repo.Hosts() > 1 || inParts:
		err = faultOf(ctx, blob, err, faultTime)
	case blob.Left() <= littleLeft:
		err = faultOf(ctx, blob, err, littleTime)
	}
	return had, inParts, err
}

// withMemory returns the limits of a layer with its share of the memory for unpacking. It waits
// where the layer is known to need more.
func (s *Store) withMemory(ctx context.Context, l registry.Layer, more lack) (_ unpack.Limits, giveBack func(), err error) {
	limits := limitsOf(l.Blob, s.cfg.Limits)
	if more == (lack{}) {
		limits, giveBack = s.memory.share(limits)
		return limits, giveBack, nil
	}
	defer s.cfg.Waits.BeginOpen("memory to be unpacked with", "layer "+l.DiffID.String())()
	return s.memory.wait(ctx, limits, more)
}

// inTurn makes a layer when its registry may have another one unpacked.
func (s *Store) inTurn(ctx context.Context, domain string, make func() error) error {
	giveBack, err := s.turns.take(ctx, domain)
	if err != nil {
		return err
	}
	defer giveBack()
	return make()
}

// refusesContent tells an error that says that a layer cannot be what its tar says.
func refusesContent(err error) bool {
	code := errdefs.Code(err)
	return code == codes.InvalidArgument || code == codes.ResourceExhausted && !errors.Is(err, unix.ENOSPC)
}

const (
	// faultTime is how long a blob is read on to learn whose fault it was, where another host, or the same once more, may do better.
	faultTime = time.Minute
	// littleLeft is how much is read on, for littleTime at most, only to tell a blob that is not what it should be from a bad tar: without that it would be
	// a matter of time which of them a short one is said to be.
	littleLeft = 4 << 20
	littleTime = 3 * time.Second
)

// faultOf reads a blob to its end whose layer was refused, and returns the blob's own error if it is not what it
// should be: a byte that changed in a host's cache shows first as a tar that cannot be. It takes no turn, for nothing is unpacked.
func faultOf(ctx context.Context, blob *registry.Blob, refused error, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	blob.Resume() // whoever refused it may have stopped it
	defer context.AfterFunc(ctx, blob.Stop)()
	if _, err := io.Copy(io.Discard, blob); errdefs.Code(err) == codes.DataLoss {
		return err
	}
	return refused
}

const (
	// maxInflation is how many times the size of its blob a tar may have. deflate
	// cannot do more than 1032; zstd could make terabytes of a few kilobytes.
	maxInflation = 1100
	// freeInflation is granted to every layer.
	freeInflation = 64 << 20
	// freeHoles is what the files of a layer may be longer than its tar, because they have holes. They take
	// no disk, but time to be read over.
	freeHoles = 4 << 30
)

// limitsOf ties what a layer may take, beside the limits, to the size of its blob, so that whoever
// wants to fill a node's disk has to send the bytes for it.
func limitsOf(blob ocispec.Descriptor, limits unpack.Limits) unpack.Limits {
	if blob.Size < limits.Tar/maxInflation {
		limits.Tar = min(limits.Tar, blob.Size*maxInflation+freeInflation)
		limits.Bytes = min(limits.Bytes, limits.Tar+freeHoles)
	}
	return limits
}
