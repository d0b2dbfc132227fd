package testutil

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience bounds Eventually. It is long because test machines may be busy. Only failing tests wait
// that long.
const patience = 30 * time.Second

// Must ends the test if err is not nil.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually polls a condition every few milliseconds, and ends the test with the text what if it
// does not hold within half a minute.
func Eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// Logger returns a logger for all levels that writes to the test's log. It drops messages after the
// end of the test, because net/http's server logs connections after it was closed.
func Logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(NewLogWriter(t), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// LogWriter writes to the log of a test until the test ends.
type LogWriter struct {
	mu sync.Mutex // guards t, also while it is written to
	// +checklocks:mu
	t testing.TB // nil: the test has ended
}

// NewLogWriter returns a LogWriter.
func NewLogWriter(t testing.TB) *LogWriter {
	w := &LogWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.t = nil
	})
	return w
}

// Write implements io.Writer.
func (w *LogWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}
