package sandbox

import (
	"log/slog"
	"math"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// Each event of a pod or container is one line at the level info. The keys namespace, podName,
// containerName and attempt hold kubelet's names. The keys pod and container hold IDs, as in all
// other lines. docs/operations.md lists the events.

// eventLog logs the events of pods and containers.
type eventLog struct {
	log     *slog.Logger
	objects objects
}

// nameAttrs returns the log attributes with a pod's names.
func nameAttrs(m *runtimeapi.PodSandboxMetadata) []any {
	return []any{slog.String("namespace", errdefs.Clip(m.GetNamespace())),
		slog.String("podName", errdefs.Clip(m.GetName()))}
}

// Pod logs an event of a pod.
func (l eventLog) Pod(event string, p *pod, more ...any) {
	attrs := append(nameAttrs(p.Config.GetMetadata()), slog.Uint64("attempt",
		uint64(p.Config.GetMetadata().GetAttempt())), slog.String("pod", p.ID))
	l.log.Info(event, append(attrs, more...)...)
}

// Container logs an event of a container.
func (l eventLog) Container(event string, c *container, more ...any) {
	var attrs []any
	if p, known := l.objects.pods.Get(c.PodID); known {
		attrs = nameAttrs(p.Config.GetMetadata())
	}
	attrs = append(attrs, slog.String("containerName", errdefs.Clip(c.Config.GetMetadata().GetName())),
		slog.Uint64("attempt", uint64(c.Config.GetMetadata().GetAttempt())), slog.String("pod",
			c.PodID), slog.String("container", c.ID))
	l.log.Info(event, append(attrs, more...)...)
}

// Exit logs the exit of a container.
func (l eventLog) Exit(c *container, exit state.Exit) {
	attrs := []any{slog.Int("code", int(exit.Code)), slog.String("reason", exit.Reason),
		slog.Bool("oom", exit.Reason == state.ReasonOOMKilled)}
	if !exit.StartedAt.IsZero() {
		attrs = append(attrs, seconds(exit.FinishedAt.Sub(exit.StartedAt)))
	}
	l.Container("container exited", c, attrs...)
}

// seconds returns a duration as a log attribute, rounded to milliseconds.
func seconds(d time.Duration) slog.Attr {
	return slog.Float64("seconds", math.Round(max(d, 0).Seconds()*1000)/1000)
}
