package sandbox

import (
	"context"
	"errors"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// A volume that hangs holds nobody who asks, and one goroutine.
func TestLookAtWhatHangs(t *testing.T) {
	m, _, _ := aReadyPod(t)
	c := &container{id: "c"}
	entered, release := make(chan struct{}), make(chan struct{})
	hangs := func() (*specs.Spec, error) { close(entered); <-release; return nil, nil }
	quick := func() (*specs.Spec, error) { return &specs.Spec{Version: specs.Version}, nil }
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	if _, err := m.lookAt(ctx, c, hangs); !errors.Is(err, context.Canceled) {
		t.Errorf("while it hangs: %v", err)
	}
	if _, err := m.lookAt(t.Context(), c, quick); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("the next: %v", err)
	}
	close(release)
	for c.looking.Load() { // until it has ended
	}
	if spec, err := m.lookAt(t.Context(), c, quick); err != nil || spec == nil {
		t.Errorf("when it has ended: %v, %v", spec, err)
	}
}
