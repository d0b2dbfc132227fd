package stats

import (
	"log/slog"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/state"
)

// fakeMeters has meters of containers, and none of pods.
type fakeMeters map[string]*ContainerMeter

func (f fakeMeters) ContainerMeter(id string) (*ContainerMeter, string, *Sample) {
	return f[id], "/kubepods/" + id, &Sample{}
}

func (fakeMeters) PodMeter(string) (*PodMeter, string) { return nil, "" }

// testStatistics has a container that can be measured and one that can't.
func testStatistics() *Reader {
	return NewReader(fakeMeters{"good": {}, "broken": Cgroups{}.ContainerMeter("not a path of cgroups", false)}, slog.New(slog.DiscardHandler))
}

// What does not run uses nothing, and is no error; what it has written is known all the same.
func TestContainerStats(t *testing.T) {
	for id, want := range map[string]struct{ running, fails bool }{"good": {running: true}, "ended": {}, "broken": {fails: true}} {
		used, err := testStatistics().ContainerStats(&state.Container{ID: id})
		if (err != nil) != want.fails || used.Running != want.running || used.Sample == nil {
			t.Errorf("%s: %+v, %v", id, used, err)
		}
		if want.running && used.Cgroup != "/kubepods/good" {
			t.Errorf("%s: its cgroup is %q", id, used.Cgroup)
		}
	}
	if detail, err := testStatistics().ContainerDetail("ended"); detail != nil || err != nil {
		t.Errorf("details of one that has ended: %v, %v", detail, err)
	}
}

// One container that can't be measured does not hide its pod, and one that is not said to run is not looked at.
func TestPodStatsLeaveOutWhatCantBeMeasured(t *testing.T) {
	running, exited := runtimeapi.ContainerState_CONTAINER_RUNNING, runtimeapi.ContainerState_CONTAINER_EXITED
	containers := []*state.Container{{ID: "broken", State: running}, {ID: "good", State: running}, {ID: "good", State: exited}, {ID: "ended", State: running}}
	used, err := testStatistics().PodStats(&state.Pod{ID: "p"}, containers)
	if err != nil || used.Running || len(used.Containers) != 1 || used.Containers[0].Info != containers[1] {
		t.Errorf("%+v, %v", used, err)
	}
}
