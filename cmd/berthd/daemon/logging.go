package daemon

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"regexp"
	"strconv"
	"time"

	"berth/cmd/config"
	"berth/sandbox/state"
)

// newLogger returns a logger that writes to w, and sets its level. The daemon logs to standard
// error, which systemd connects to the journal. names finds the names of pods and containers.
func newLogger(cfg *config.Config, level *slog.LevelVar, w io.Writer,
	names func(id string) (state.Names, bool)) *slog.Logger {
	options := slog.HandlerOptions{Level: level}
	if l, err := logLevel(cfg); err == nil { // the configuration allows only slog's level names
		level.Set(l)
	}
	if cfg.LogFormat == "json" {
		return slog.New(describing{slog.NewJSONHandler(w, &options), names})
	}
	return slog.New(describing{slog.NewTextHandler(w, &options), names})
}

// describing completes each record in one place. A record with the ID of a pod or container, also
// within a text, gets kubelet's names. Durations become seconds in both formats.
type describing struct {
	slog.Handler
	names func(id string) (state.Names, bool)
}

// objectID matches the ID of a pod or container.
var objectID = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

// Handle implements slog.Handler.
func (d describing) Handle(ctx context.Context, r slog.Record) error {
	full := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	var found state.Names
	named := false
	r.Attrs(func(a slog.Attr) bool {
		full.AddAttrs(inSeconds(a))
		named = named || a.Key == "podName"
		for _, id := range objectID.FindAllString(a.Value.String(), -1) {
			if n, known := d.names(id); known && (found == state.Names{} || found.Container == "" && n.Container != "") {
				found = n
			}
		}
		return true
	})
	if !named {
		full.AddAttrs(found.Attrs()...)
	}
	return d.Handler.Handle(ctx, full)
}

// WithAttrs implements slog.Handler.
func (d describing) WithAttrs(attrs []slog.Attr) slog.Handler {
	return describing{d.Handler.WithAttrs(attrs), d.names}
}

// WithGroup implements slog.Handler.
func (d describing) WithGroup(name string) slog.Handler {
	return describing{d.Handler.WithGroup(name), d.names}
}

// inSeconds returns a duration as a number of seconds with microseconds. slog writes small numbers
// with an exponent, which sort and awk read worse.
func inSeconds(a slog.Attr) slog.Attr {
	if v := a.Value.Resolve(); v.Kind() == slog.KindDuration {
		seconds := v.Duration().Round(time.Microsecond).Seconds()
		return slog.Any(a.Key, json.Number(strconv.FormatFloat(seconds, 'f', -1, 64)))
	}
	return a
}
