package image

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/opencontainers/go-digest"

	"berth/internal/rootfs"
)

// TestPullWaitsForLayerDeletion: a pull that needs a layer that is being deleted goes
// on when it is gone; a container does not get it.
func TestPullWaitsForLayerDeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refs := newLayerRefs()
		refs.settle()
		layers := []digest.Digest{"sha256:a", "sha256:b"}
		forms := []form{{rootfs.Directory, layers[0]}, {rootfs.EROFS, layers[1]}}
		if got := refs.markDeleting(forms[:1]); !slices.Equal(got, forms[:1]) {
			t.Fatalf("marked for deletion: %v", got)
		}
		if got := refs.markDeleting(forms[:1]); len(got) != 0 {
			t.Errorf("marked for deletion twice: %v", got)
		}
		if _, ok := refs.tryAcquire("ctr", layers); ok {
			t.Error("got a deleting layer")
		}
		if _, ok := refs.tryAcquire("image", layers, rootfs.EROFS); !ok {
			t.Error("did not get a layer of which another form is deleting")
		}
		refs.release("image")
		done := make(chan error)
		go func() { done <- refs.acquire(t.Context(), "pull", layers) }()
		synctest.Wait()
		select {
		case <-done:
			t.Fatal("did not wait")
		default:
		}
		refs.deleted(forms[0])
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if got := refs.markDeleting(forms); len(got) != 0 {
			t.Errorf("marked %v for deletion, which is needed", got)
		}
		refs.markDeleting([]form{{rootfs.EROFS, "sha256:c"}})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := refs.acquire(ctx, "pull", []digest.Digest{"sha256:c"}); err != context.Canceled {
			t.Errorf("got %v", err)
		}
	})
}
