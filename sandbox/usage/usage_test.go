package usage

import (
	"log/slog"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/census"
	"berth/sandbox/meter"
	"berth/sandbox/view"
)

// fakeMeters has meters of containers, and none of pods.
type fakeMeters map[string]*meter.Container

func (f fakeMeters) ContainerMeter(id string) (*meter.Container, string, *census.Count) {
	return f[id], "/kubepods/" + id, &census.Count{}
}

func (fakeMeters) PodMeter(string) (*meter.Pod, string) { return nil, "" }

// testStatistics has a container that can be measured and one that can't.
func testStatistics() *Statistics {
	return New(fakeMeters{"good": {}, "broken": meter.Cgroups{}.Container("not a path of cgroups", false)}, slog.New(slog.DiscardHandler))
}

// What does not run uses nothing, and is no error; what it has written is known all the same.
func TestContainerStats(t *testing.T) {
	for id, want := range map[string]struct{ running, fails bool }{"good": {running: true}, "ended": {}, "broken": {fails: true}} {
		stats, err := testStatistics().ContainerStats(&view.Container{ID: id})
		if (err != nil) != want.fails || stats.Running != want.running || stats.Census == nil {
			t.Errorf("%s: %+v, %v", id, stats, err)
		}
		if want.running && stats.Cgroup != "/kubepods/good" {
			t.Errorf("%s: its cgroup is %q", id, stats.Cgroup)
		}
	}
	if detail, err := testStatistics().ContainerDetail("ended"); detail != nil || err != nil {
		t.Errorf("details of one that has ended: %v, %v", detail, err)
	}
}

// One container that can't be measured does not hide its pod, and one that is not said to run is not looked at.
func TestPodStatsLeaveOutWhatCantBeMeasured(t *testing.T) {
	running, exited := runtimeapi.ContainerState_CONTAINER_RUNNING, runtimeapi.ContainerState_CONTAINER_EXITED
	containers := []*view.Container{{ID: "broken", State: running}, {ID: "good", State: running}, {ID: "good", State: exited}, {ID: "ended", State: running}}
	stats, err := testStatistics().PodStats(&view.Pod{ID: "p"}, containers)
	if err != nil || stats.Running || len(stats.Containers) != 1 || stats.Containers[0].Info != containers[1] {
		t.Errorf("%+v, %v", stats, err)
	}
}
