package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"berth/cmd/config"
	"berth/internal/cleanup"
	"berth/internal/trace/otlp"
	"berth/internal/version"
	"berth/server"
)

// flushTimeout bounds how long the shutdown waits for the collector.
const flushTimeout = 2 * time.Second

// startTracing starts the export of traces, or returns nil if none is configured. The shutdown
// sends traces that are still queued.
func startTracing(cfg *config.Config, limit shutdown, closing *cleanup.List, log *slog.Logger) (server.Tracing, error) {
	if cfg.TracingEndpoint == "" {
		return nil, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("read the node's name for traces: %w", err)
	}
	exporter, err := otlp.New(otlp.Config{
		Endpoint:   cfg.TracingEndpoint,
		Protocol:   cfg.TracingProtocol,
		Insecure:   cfg.TracingInsecure,
		PerMillion: cfg.TracingSamplingRate,
		Version:    version.Get(),
		Host:       host,
		Log:        log,
	})
	if err != nil {
		return nil, err
	}
	closing.Add("flush traces", limit.within(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, flushTimeout)
		defer cancel()
		if err := exporter.Close(ctx); err != nil {
			log.Warn("flush traces", "error", err) // not a failure of the daemon
		}
		return nil
	}))
	return exporter, nil
}
