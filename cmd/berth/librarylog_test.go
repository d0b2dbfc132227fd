package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
)

func TestLibraryLog(t *testing.T) {
	var out bytes.Buffer
	captureLibraryLog(slog.New(slog.NewTextHandler(&out, nil)))
	logrus.WithError(errors.New("EOF")).Error("failed sending message")
	logrus.Info("a step")
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `level=WARN msg="failed sending message" error=EOF`) {
		t.Errorf("the log is %q", got)
	}
}
