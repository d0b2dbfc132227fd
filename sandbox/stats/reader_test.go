package stats

import (
	"log/slog"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/state"
)

// fakeMeters has meters of containers and none of pods.
type fakeMeters map[string]*ContainerMeter

func (f fakeMeters) ContainerMeter(id string) (*ContainerMeter, string, *Sample) {
	return f[id], "/kubepods/" + id, &Sample{}
}

func (fakeMeters) PodMeter(string) (*PodMeter, string) { return nil, "" }

// testReader returns a Reader for two containers, "good" and "broken". The latter cannot be
// measured.
func testReader() *Reader {
	return NewReader(fakeMeters{"good": {}, "broken": Cgroups{}.ContainerMeter("not a path of cgroups", false)}, slog.New(slog.DiscardHandler))
}

// A container that does not run has no usage, but still its last sample.
func TestContainerStats(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]struct{ running, fails bool }{"good": {running: true}, "ended": {}, "broken": {fails: true}} {
		t.Run(id, func(t *testing.T) {
			used, err := testReader().ContainerStats(&state.Container{ID: id})
			if (err != nil) != want.fails || used.Running != want.running || used.Sample == nil {
				t.Errorf("%+v, %v", used, err)
			}
			if want.running && used.Cgroup != "/kubepods/good" {
				t.Errorf("cgroup %q", used.Cgroup)
			}
		})
	}
	if detail, err := testReader().ContainerDetail("ended"); detail != nil || err != nil {
		t.Errorf("details of an ended container: %v, %v", detail, err)
	}
}

// A container that cannot be measured does not hide its pod. A container that does not run is
// skipped.
func TestPodStatsSkipUnmeasurableContainers(t *testing.T) {
	t.Parallel()
	running, exited := runtimeapi.ContainerState_CONTAINER_RUNNING, runtimeapi.ContainerState_CONTAINER_EXITED
	containers := []*state.Container{{ID: "broken", State: running}, {ID: "good", State: running}, {ID: "good", State: exited}, {ID: "ended", State: running}}
	used, err := testReader().PodStats(&state.Pod{ID: "p"}, containers)
	if err != nil || used.Running || len(used.Containers) != 1 || used.Containers[0].Info != containers[1] {
		t.Errorf("%+v, %v", used, err)
	}
}
