package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
)

// Whatever a count takes, and however many containers there are, nothing else is counted
// for nine times as long.
func TestRestAfterCount(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{0: 0, time.Millisecond: 9 * time.Millisecond, time.Second: 9 * time.Second, time.Hour: maxRest} {
		if got := restAfter(took); got != want {
			t.Errorf("after %v: %v, want %v", took, got, want)
		}
	}
}

func TestNextToCount(t *testing.T) {
	now := time.Now()
	running, exited := runtimeapi.ContainerState_CONTAINER_RUNNING, runtimeapi.ContainerState_CONTAINER_EXITED
	counted := &Census{At: now}
	type state struct {
		info   *ContainerInfo
		census *Census
	}
	for name, c := range map[string]struct {
		containers map[string]state
		due        map[string]time.Time
		want       string // empty: nothing is due
		idle       bool   // and nothing will be
	}{
		"none":                {idle: true, due: map[string]time.Time{"removed": now}},
		"not published":       {containers: map[string]state{"a": {}}, idle: true},
		"never counted first": {containers: map[string]state{"a": {&ContainerInfo{State: running}, counted}, "b": {&ContainerInfo{State: exited}, nil}}, due: map[string]time.Time{"a": now.Add(-time.Hour)}, want: "b"},
		"longest first": {containers: map[string]state{"a": {&ContainerInfo{State: running}, counted}, "b": {&ContainerInfo{State: running}, counted}},
			due: map[string]time.Time{"a": now.Add(-time.Minute), "b": now.Add(-time.Hour)}, want: "b"},
		"not due":         {containers: map[string]state{"a": {&ContainerInfo{State: running}, counted}}, due: map[string]time.Time{"a": now.Add(time.Hour)}},
		"ended and known": {containers: map[string]state{"a": {&ContainerInfo{State: exited, FinishedAt: now.Add(-time.Minute)}, counted}}, idle: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := statsManager()
			for id, s := range c.containers {
				one := &container{id: id}
				one.info.Store(s.info)
				one.census.Store(s.census)
				m.containers.put(id, one)
			}
			got, wait := m.nextToCount(c.due)
			if (got == nil) != (c.want == "") || got != nil && got.id != c.want {
				t.Errorf("got %v", got)
			}
			if got == nil && (wait > 2*time.Hour) != c.idle {
				t.Errorf("the next is due after %v", wait)
			}
			if _, there := c.due["removed"]; there {
				t.Error("a container that is gone is remembered")
			}
		})
	}
}

func TestAddFiles(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var own, gone ProcessCensus
	if err := own.addFiles(t.Context(), fmt.Sprintf("/proc/%d/fd/", os.Getpid())); err != nil || own.Files < 4 || own.Sockets < 1 {
		t.Errorf("%+v, %v", own, err)
	}
	if err := gone.addFiles(t.Context(), "/proc/1073741824/fd/"); err != nil || gone != (ProcessCensus{}) {
		t.Errorf("%+v, %v", gone, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := gone.addFiles(ctx, "/proc/self/fd/"); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	full := ProcessCensus{Files: maxFiles}
	if err := full.addFiles(t.Context(), "/proc/self/fd/"); err != nil || full.Files != maxFiles {
		t.Errorf("%+v, %v", full, err)
	}
}

// brokenMeter fails with something else than the end of its container.
func brokenMeter() *meter {
	return &meter{reader: cgstats.New(func() (cgstats.Group, error) { return cgstats.Group{}, errors.New("no cgroups") }, false)}
}

// One container that can't be measured does not hide its pod.
func TestPodStatsLeaveOutWhatCantBeMeasured(t *testing.T) {
	m := statsManager()
	m.log = slog.New(slog.DiscardHandler)
	m.pods.put("p", &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}})
	var infos []*ContainerInfo
	for _, id := range []string{"broken", "good"} {
		c := &container{id: id, podID: "p"}
		run := &running{meter: &meter{}}
		if id == "broken" {
			run.meter = brokenMeter()
		}
		c.running.Store(run)
		m.containers.put(id, c)
		infos = append(infos, &ContainerInfo{ID: id, State: runtimeapi.ContainerState_CONTAINER_RUNNING})
	}
	stats, err := m.PodStats(&PodInfo{ID: "p"}, infos)
	if err != nil || len(stats.Containers) != 1 || stats.Containers[0].Info.ID != "good" {
		t.Errorf("%+v, %v", stats, err)
	}
}
