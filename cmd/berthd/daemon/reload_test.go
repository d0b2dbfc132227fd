package daemon

import (
	"log/slog"
	"testing"

	"berth/cmd/config"
	"berth/internal/testutil"
)

// A configuration that cannot be read changes nothing.
func TestRefusedReloadKeepsConfiguration(t *testing.T) {
	t.Parallel()
	running := config.Default()
	level := new(slog.LevelVar)
	load := func() (*config.Config, []string, error) {
		c, err := config.Parse("f", []byte("[log]\nlevel = 'loud'\n"))
		return c, nil, err
	}
	var out testutil.Buffer
	r := newReloader(running, load, level, slog.New(slog.NewTextHandler(&out, nil)))
	r.reload(t.Context())
	if r.settings() != any(running) || level.Level() != slog.LevelInfo {
		t.Errorf("settings changed: %+v", r.settings())
	}
	if err := r.apply(t.Context()); err == nil {
		t.Error("a faulty configuration is applied")
	}
}

// Requests during a reload are one further reload, and never block.
func TestReloadRequestsCollapse(t *testing.T) {
	t.Parallel()
	r := newReloader(config.Default(), nil, new(slog.LevelVar), testutil.Logger(t))
	for range 5 {
		r.request()
	}
	if n := len(r.requests); n != 1 {
		t.Errorf("%d requests are queued", n)
	}
}
