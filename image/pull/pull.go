package pull

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image"
	"berth/image/registry"
	"berth/image/trust"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// Pull fetches the image that ref names and records it under that name. It asks the registry even
// if the image is present, because the registry controls the access and the tag's target. auth may
// be nil. See package registry for the errors. The documentation of this package describes the
// errors of an unavailable registry and of a rejected signature.
func (p *Puller) Pull(ctx context.Context, ref string, auth *runtimeapi.AuthConfig) (*image.Image, error) {
	return p.PullFor(ctx, "", ref, auth)
}

// PullFor is Pull for a pod in a namespace, which may have a signature policy of its own.
func (p *Puller) PullFor(ctx context.Context, namespace, ref string,
	auth *runtimeapi.AuthConfig) (*image.Image, error) {
	track, err := p.pulls.start(ref)
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	defer p.pulls.end(track)
	defer p.governor.Begin()()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	img, err := p.pull(ctx, namespace, ref, auth, track)
	result := track.result(err)
	p.cfg.Observer.Pulled(track.registry, result)
	if err != nil {
		return nil, pullError(ref, err)
	}
	if result.Lazy == 0 && track.fromPeers() == 0 {
		p.lazy.Observe(track.registry, track.received(), result.Took)
	}
	p.log.Info("image pulled", "ref", ref, "image", img.ID, "size", img.Size, "host", strings.Join(track.hosts, ","),
		"bytes", track.received(), "peerBytes", track.fromPeers(),
		"seconds", math.Round(time.Since(track.started).Seconds()*1000)/1000)
	return img, nil
}

// pullError converts the error of a failed pull to the form that kubelet expects.
func pullError(ref string, err error) error {
	var down *registry.UnavailableError
	if errors.As(err, &down) {
		return errdefs.New(codes.Unknown, "%w: pull %s: %w", crierrors.ErrRegistryUnavailable, ref, err)
	}
	var rejected *trust.RejectedError
	if errors.As(err, &rejected) {
		return image.SignatureError("pull "+ref, err)
	}
	return fmt.Errorf("pull %s: %w", ref, err)
}

func (p *Puller) pull(ctx context.Context, namespace, name string, auth *runtimeapi.AuthConfig,
	track *pullTrack) (img *image.Image, err error) {
	candidates, err := p.client.Candidates(name)
	if err != nil {
		return nil, err
	}
	credentials, err := registry.FromCRI(auth)
	if err != nil {
		return nil, err
	}
	var earlier []string // errors of other candidates
	err = p.retry(ctx, "image "+name, attempt{}, func(at attempt) (options, error) {
		ref := candidates[at.name]
		img, err = p.pullReference(ctx, namespace, ref, credentials, track)
		if err != nil && len(candidates) > 1 {
			err = fmt.Errorf("%s: %w", ref, err)
			text := err.Error()
			if len(earlier) > 0 {
				err = fmt.Errorf("%s; %w", strings.Join(earlier, "; "), err)
			}
			earlier = append(earlier, text)
		}
		return options{names: len(candidates)}, err
	})
	return img, err
}

// pullReference pulls the image that a complete reference names.
func (p *Puller) pullReference(ctx context.Context, namespace string, ref registry.Reference,
	credentials registry.Credentials, track *pullTrack) (*image.Image, error) {
	track.registry = ref.Domain
	repo, err := p.client.Open(ref, credentials)
	if err != nil {
		return nil, err
	}
	defer repo.Close()
	defer func() { track.hosts = repo.Served() }()
	resolving := trace.Begin(ctx, "resolve")
	end := p.cfg.Waits.BeginOpen("registry manifest", "image "+ref.String()) // stalled transfers end, so no deadline
	if img := p.unchanged(ctx, repo); img != nil && p.store.MayReuse(ctx, namespace, ref, img.ID) {
		end()
		resolving.End()
		p.lazy.Offer(repo, img.Layers...)
		return img, nil
	}
	resolved, err := repo.Resolve(ctx, p.cfg.Platform)
	end()
	resolving.End()
	if err != nil {
		return nil, err
	}
	if err := checkSizes(resolved.Layers, p.cfg.Limits); err != nil {
		return nil, err
	}
	checking := trace.Begin(ctx, "check signatures")
	evidence, err := p.store.CheckPull(ctx, namespace, repo, resolved)
	checking.End()
	if err != nil {
		return nil, err
	}
	return p.fetch(ctx, repo, resolved, evidence, track.setLayers(resolved.Layers))
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
func (p *Puller) unchanged(ctx context.Context, repo *registry.Repository) *image.Image {
	ref := repo.Reference()
	if p.store.Snapshot().Named(ref.String()) == nil {
		return nil
	}
	d := repo.Digest(ctx)
	x := p.store.Snapshot() // the image may have been removed meanwhile, or the tag moved
	img := x.Named(ref.String())
	if d == "" || x.Named(ref.WithDigest(d)) != img {
		return nil
	}
	return img
}
