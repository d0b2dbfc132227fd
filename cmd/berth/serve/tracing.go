package serve

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"berth/cmd/berth/config"
	"berth/internal/cleanup"
	"berth/internal/trace/otlp"
	"berth/internal/version"
	"berth/server"
)

// flushLimit is how long the daemon's end waits for a collector.
const flushLimit = 2 * time.Second

// startTracing exports what requests spend their time on, if that is configured; nil if not. What is still recorded when the daemon ends, that is until
// its last operation has ended, is sent before the end.
func startTracing(cfg *config.Config, end ending, closing *cleanup.List, log *slog.Logger) (server.Tracing, error) {
	if cfg.TracingEndpoint == "" {
		return nil, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name of the node, for traces: %w", err)
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
	closing.Add("send the last traces", end.within(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, flushLimit)
		defer cancel()
		if err := exporter.Close(ctx); err != nil {
			log.Warn("the last traces", "error", err) // no reason to have failed
		}
		return nil
	}))
	return exporter, nil
}
