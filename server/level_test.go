package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"berth/internal/errdefs"
)

// Failed calls are warnings, except for calls that the client gave up or ended by another call.
func TestLevelOf(t *testing.T) {
	t.Parallel()
	refused := errdefs.FailedPrecondition("the pod is not ready")
	for name, c := range map[string]struct {
		err  error
		want slog.Level
	}{
		"success":                    {nil, slog.LevelDebug},
		"it does not exist":          {errdefs.NotFound("no such pod"), slog.LevelDebug},
		"the client gave up":         {fmt.Errorf("pull: %w", context.Canceled), slog.LevelDebug},
		"deadline exceeded":          {fmt.Errorf("pull: %w", context.DeadlineExceeded), slog.LevelWarn},
		"refused":                    {refused, slog.LevelWarn},
		"superseded by another call": {errdefs.Superseded(refused), slog.LevelDebug},
		"the same, wrapped":          {fmt.Errorf("start: %w", errdefs.Superseded(refused)), slog.LevelDebug},
		"an error without a code":    {errors.New("disk"), slog.LevelWarn},
		"nil, superseded":            {errdefs.Superseded(nil), slog.LevelDebug},
	} {
		t.Run(name, func(t *testing.T) {
			if got := levelOf(c.err); got != c.want {
				t.Errorf("got %s", got)
			}
		})
	}
}
