package daemon

import (
	"context"
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"
	"k8s.io/klog/v2"
)

// libraryLog forwards messages that libraries (opencontainers/cgroups, ttrpc) log through logrus,
// so that the daemon's log has one format.
type libraryLog struct{ log *slog.Logger }

// captureLibraryLog redirects the messages of logrus and klog to log.
func captureLibraryLog(log *slog.Logger) {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.StandardLogger().ReplaceHooks(logrus.LevelHooks{})
	logrus.AddHook(libraryLog{log})
	klog.SetSlogLogger(slog.New(debugOnly{log.Handler()})) // klog reports how each client's connection ended
}

// debugOnly logs every record at level debug.
type debugOnly struct{ slog.Handler }

// Enabled implements slog.Handler.
func (d debugOnly) Enabled(ctx context.Context, _ slog.Level) bool {
	return d.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle implements slog.Handler. It checks the level, because logr passes on errors without a
// check.
func (d debugOnly) Handle(ctx context.Context, r slog.Record) error {
	if !d.Enabled(ctx, r.Level) {
		return nil
	}
	r.Level = slog.LevelDebug
	return d.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (d debugOnly) WithAttrs(attrs []slog.Attr) slog.Handler {
	return debugOnly{d.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (d debugOnly) WithGroup(name string) slog.Handler { return debugOnly{d.Handler.WithGroup(name)} }

// Levels implements logrus.Hook.
func (libraryLog) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook. It logs a library's errors as warnings, because the operation itself
// reports whether it failed.
func (l libraryLog) Fire(e *logrus.Entry) error {
	var fields []any
	for key, value := range e.Data {
		fields = append(fields, slog.Any(key, value))
	}
	l.log.Warn(e.Message, fields...)
	return nil
}
