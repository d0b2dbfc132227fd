package main

import (
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"
)

// libraryLog passes on what libraries (opencontainers/cgroups, ttrpc) log through logrus, so that the daemon's log has
// one form.
type libraryLog struct{ log *slog.Logger }

// captureLibraryLog sends logrus's messages to log; it keeps logrus from writing them itself.
func captureLibraryLog(log *slog.Logger) {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.StandardLogger().ReplaceHooks(logrus.LevelHooks{})
	logrus.AddHook(libraryLog{log})
}

// Levels implements logrus.Hook.
func (libraryLog) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook. What a library takes for an error is a warning here: the operation that it is part of tells
// whether it failed.
func (l libraryLog) Fire(e *logrus.Entry) error {
	var fields []any
	for key, value := range e.Data {
		fields = append(fields, slog.Any(key, value))
	}
	l.log.Warn(e.Message, fields...)
	return nil
}
