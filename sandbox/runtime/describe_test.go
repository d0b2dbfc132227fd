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

// A hanging volume blocks one goroutine and no caller.
func TestDescribeOnceWithHangingVolume(t *testing.T) {
	k := Launcher{Tasks: task.NewRunner(slog.New(slog.DiscardHandler), nil)}
	var describing atomic.Bool
	entered, release := make(chan struct{}), make(chan struct{})
	hangs := func() (*specs.Spec, error) { close(entered); <-release; return nil, nil }
	quick := func() (*specs.Spec, error) { return &specs.Spec{Version: specs.Version}, nil }
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-entered; cancel() }()
	if _, err := k.describeOnce(ctx, "c", &describing, hangs); !errors.Is(err, context.Canceled) {
		t.Errorf("while the volume hangs: %v", err)
	}
	if _, err := k.describeOnce(t.Context(), "c", &describing, quick); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("second call: %v", err)
	}
	close(release)
	for describing.Load() { // until the inspection ends
	}
	if spec, err := k.describeOnce(t.Context(), "c", &describing, quick); err != nil || spec == nil {
		t.Errorf("after the first call: %v, %v", spec, err)
	}
}
