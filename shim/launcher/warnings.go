package launcher

import (
	"io"
	"sync"

	"github.com/sirupsen/logrus"
)

// maxWarnings is the number of warnings that one reply carries.
const maxWarnings = 32

// warningList collects libcontainer's warnings and the launcher's own until a reply takes them to
// the daemon's log. It is safe for concurrent use.
type warningList struct {
	mu sync.Mutex
	// +checklocks:mu
	text []string
}

// collectWarnings returns a list of all warnings that are logged from now on.
func collectWarnings() *warningList {
	w := &warningList{}
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(w)
	return w
}

// Levels and Fire implement logrus.Hook.
func (w *warningList) Levels() []logrus.Level {
	return []logrus.Level{logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel, logrus.WarnLevel}
}

func (w *warningList) Fire(e *logrus.Entry) error {
	text := e.Message
	if err, ok := e.Data[logrus.ErrorKey].(error); ok {
		text += ": " + err.Error()
	}
	w.add(text)
	return nil
}

// add adds a warning unless the list is full.
func (w *warningList) add(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.text) < maxWarnings {
		w.text = append(w.text, text)
	}
}

// take returns the warnings and empties the list.
func (w *warningList) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := w.text
	w.text = nil
	return text
}
