package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"berth/cmd/config"
	"berth/sandbox/state"
)

// Each line about a pod or container has kubelet's names, in whatever form the line has the ID.
// Durations are seconds in both formats.
func TestLogLinesHaveNamesAndSeconds(t *testing.T) {
	t.Parallel()
	pod, container, unknown := strings.Repeat("1", 64), strings.Repeat("2", 64), strings.Repeat("3", 64)
	names := func(id string) (state.Names, bool) {
		n, known := map[string]state.Names{
			pod: {Namespace: "ns", Pod: "web"}, container: {Namespace: "ns", Pod: "web", Container: "app"},
		}[id]
		return n, known
	}
	const ofPod, ofContainer = "namespace=ns podName=web", "namespace=ns podName=web containerName=app"
	for _, tt := range []struct {
		attr any
		want string
	}{
		{slog.String("pod", pod), ofPod},
		{slog.String("container", container), ofContainer},
		{slog.String("object", container), ofContainer},
		{slog.Any("error", fmt.Errorf("stop container %s: %w", container, errors.New("x"))), ofContainer},
		{slog.String("path", "/run/berth/pods/"+pod+"/shm"), ofPod},
		{slog.Any("all", []string{pod, container}), ofContainer},
		{slog.String("container", unknown), ""},
		{slog.Duration("took", 1234567*time.Microsecond), "took=1.234567"},
		{slog.Duration("took", 9*time.Microsecond), "took=0.000009"},
	} {
		for _, format := range []string{"text", "json"} {
			var out bytes.Buffer
			log := newLogger(&config.Config{LogLevel: "info", LogFormat: format}, new(slog.LevelVar), &out, names)
			log.WithGroup("").With("x", 1).Warn("y", tt.attr)
			want := tt.want
			if format == "json" {
				want = strings.NewReplacer("namespace=ns", `"namespace":"ns"`, " podName=web", `,"podName":"web"`, " containerName=app",
					`,"containerName":"app"`, "took=", `"took":`).Replace(want)
			}
			if line := out.String(); !strings.Contains(line, want) || want == "" && strings.Contains(line, "podName") {
				t.Errorf("%v: %s, want %s", tt.attr, line, want)
			}
		}
	}
	var out bytes.Buffer
	newLogger(&config.Config{LogLevel: "info"}, new(slog.LevelVar), &out, names).Info("pod ready", "podName", "other", "pod", pod)
	if strings.Count(out.String(), "podName") != 1 {
		t.Errorf("names twice: %s", out.String())
	}
}
