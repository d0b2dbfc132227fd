package podrun

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/podyaml"
)

// imageKey identifies an image as a container requests it.
type imageKey struct {
	ref    string
	policy corev1.PullPolicy
}

func keyOf(c podyaml.Container) imageKey { return imageKey{c.Image, c.ImagePullPolicy} }

// pullImages pulls all images of the pod in parallel before the first container starts. So a
// missing image does not leave a partly started pod.
func (r *podRun) pullImages(ctx context.Context) error {
	var mu sync.Mutex // guards r.images
	group, ctx := errgroup.WithContext(ctx)
	seen := map[imageKey]bool{}
	for _, c := range r.plan.Containers() {
		key := keyOf(c)
		if seen[key] {
			continue
		}
		seen[key] = true
		group.Go(func() error {
			image, err := r.ensureImage(ctx, key)
			mu.Lock()
			defer mu.Unlock()
			r.images[key] = image
			return err
		})
	}
	return group.Wait()
}

// ensureImage returns the image after pulling it as its policy demands.
func (r *podRun) ensureImage(ctx context.Context, key imageKey) (*runtimeapi.Image, error) {
	if r.config.Pull != "" {
		key.policy = r.config.Pull
	}
	if key.policy != corev1.PullAlways {
		image, err := r.image(ctx, key.ref)
		if image != nil || err != nil {
			return image, err
		}
		if key.policy == corev1.PullNever {
			return nil, fmt.Errorf("image %s does not exist, and its imagePullPolicy is Never", key.ref)
		}
	}
	r.config.Report("pulling %s", key.ref)
	id, err := r.client.PullFor(ctx, r.plan.Sandbox().GetMetadata(), key.ref, nil)
	if err != nil {
		if present, _ := r.image(ctx, key.ref); present != nil && ctx.Err() == nil {
			err = fmt.Errorf("%w; the image is on this node, and --pull=missing uses it", err)
		}
		return nil, err
	}
	image, err := r.image(ctx, id)
	if image == nil && err == nil {
		err = fmt.Errorf("image %s (%s) was removed right after its pull", key.ref, id)
	}
	return image, err
}

// image returns the runtime's description of an image, or nil if it has none.
func (r *podRun) image(ctx context.Context, ref string) (*runtimeapi.Image, error) {
	reply, err := r.client.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: ref}})
	if err != nil {
		return nil, fmt.Errorf("status of image %s: %w", ref, err)
	}
	return reply.GetImage(), nil
}
