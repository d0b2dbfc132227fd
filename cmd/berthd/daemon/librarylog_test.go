package daemon

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	"k8s.io/klog/v2"
)

func TestLogrusMessagesAreWarnings(t *testing.T) {
	t.Cleanup(klog.ClearLogger)
	var out bytes.Buffer
	captureLibraryLog(slog.New(slog.NewTextHandler(&out, nil)))
	logrus.WithError(errors.New("EOF")).Error("failed sending message")
	logrus.Info("a step")
	klog.Error("a client hung up") // below the level of this log
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `level=WARN msg="failed sending message" error=EOF`) {
		t.Errorf("the log is %q", got)
	}
}

func TestKlogMessagesAreLoggedAsDebug(t *testing.T) {
	t.Cleanup(klog.ClearLogger)
	var out bytes.Buffer
	captureLibraryLog(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
	klog.FromContext(t.Context()).Error(errors.New("EOF"), "a client hung up")
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `level=DEBUG msg="a client hung up"`) {
		t.Errorf("the log is %q", got)
	}
}
