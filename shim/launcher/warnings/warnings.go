// Package warnings collects what libcontainer logs in a launcher, and what that has to say itself, for the daemon's log.
package warnings

import (
	"io"
	"sync"

	"github.com/sirupsen/logrus"
)

// List is what was said and not yet taken. It keeps no more than a reply carries.
type List struct {
	mu   sync.Mutex // guards text
	text []string
}

// limit bounds what one reply carries.
const limit = 32

// Collect returns the list of all that is logged from now on.
func Collect() *List {
	w := &List{}
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(w)
	return w
}

// Levels, with Fire, makes a List a logrus.Hook.
func (w *List) Levels() []logrus.Level {
	return []logrus.Level{logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel, logrus.WarnLevel}
}

// Fire adds what is logged.
func (w *List) Fire(e *logrus.Entry) error {
	text := e.Message
	if err, ok := e.Data[logrus.ErrorKey].(error); ok {
		text += ": " + err.Error()
	}
	w.Add(text)
	return nil
}

// Add adds a warning, unless there are too many.
func (w *List) Add(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.text) < limit {
		w.text = append(w.text, text)
	}
}

// Take empties the list.
func (w *List) Take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := w.text
	w.text = nil
	return text
}
