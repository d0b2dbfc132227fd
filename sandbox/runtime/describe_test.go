package runtime

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/task"
)

// A hanging volume blocks no caller and holds one goroutine.
func TestLookAtWhatHangs(t *testing.T) {
	k := Launcher{Tasks: task.NewRunner(slog.New(slog.DiscardHandler), nil)}
	var looking atomic.Bool
	entered, release := make(chan struct{}), make(chan struct{})
	hangs := func() (*specs.Spec, error) { close(entered); <-release; return nil, nil }
	quick := func() (*specs.Spec, error) { return &specs.Spec{Version: specs.Version}, nil }
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	if _, err := k.lookAt(ctx, "c", &looking, hangs); !errors.Is(err, context.Canceled) {
		t.Errorf("while it hangs: %v", err)
	}
	if _, err := k.lookAt(t.Context(), "c", &looking, quick); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("the next: %v", err)
	}
	close(release)
	for looking.Load() { // until it has ended
	}
	if spec, err := k.lookAt(t.Context(), "c", &looking, quick); err != nil || spec == nil {
		t.Errorf("when it has ended: %v, %v", spec, err)
	}
}
