package pull

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/registry"
	"berth/image/registry/registrytest"
)

// An unpacker that needs no more input does not wait for the limit of all pulls.
func TestStopEndsWaitForBandwidth(t *testing.T) {
	reg := registrytest.New(t)
	layer := registrytest.Layer{Blob: make([]byte, 64<<10)}
	reg.PutImage("team/app", "v1", "", layer)
	client, err := registry.NewClient(registry.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := registry.ParseReference(reg.Host() + "/team/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := client.Open(ref, registry.Credentials{})
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	blob, err := repo.Blob(t.Context(), ocispec.Descriptor{
		Digest: digest.FromBytes(layer.Blob), Size: int64(len(layer.Blob)),
	}, 0, func(int) {})
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	waiting := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	traced := &tracedBlob{Blob: blob, ctx: ctx, stop: stop, slow: func(ctx context.Context, _ int) error {
		close(waiting)
		<-ctx.Done()
		return ctx.Err()
	}}
	go func() {
		<-waiting
		traced.Stop()
	}()
	if _, err := traced.Read(make([]byte, 10)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
