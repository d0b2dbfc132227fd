package launcher

import (
	"io"
	"sync"

	"github.com/sirupsen/logrus"
)

// warnings collects what libcontainer logs, for the daemon's log.
type warnings struct {
	mu   sync.Mutex // guards text
	text []string
}

// maxWarnings bounds what one reply carries.
const maxWarnings = 32

func collectWarnings() *warnings {
	w := &warnings{}
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.WarnLevel)
	logrus.AddHook(w)
	return w
}

// Levels and Fire make warnings a logrus.Hook.
func (w *warnings) Levels() []logrus.Level {
	return []logrus.Level{logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel, logrus.WarnLevel}
}

func (w *warnings) Fire(e *logrus.Entry) error {
	text := e.Message
	if err, ok := e.Data[logrus.ErrorKey].(error); ok {
		text += ": " + err.Error()
	}
	w.add(text)
	return nil
}

func (w *warnings) add(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.text) < maxWarnings {
		w.text = append(w.text, text)
	}
}

func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := w.text
	w.text = nil
	return text
}
