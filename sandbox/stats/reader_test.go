package stats

import (
	"log/slog"
	"testing"

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
			used, err := testReader().ContainerStats(&state.Container{ContainerSpec: &state.ContainerSpec{ID: id}})
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
	in := func(id string, phase state.Phase) *state.Container {
		return &state.Container{ContainerSpec: &state.ContainerSpec{ID: id}, ContainerStatus: state.NewContainerStatus(phase)}
	}
	containers := []*state.Container{in("broken", state.ContainerRunning), in("good", state.ContainerRunning),
		in("good", state.ContainerExited), in("ended", state.ContainerRunning)}
	used, err := testReader().PodStats(&state.Pod{PodSpec: &state.PodSpec{ID: "p"}}, containers)
	if err != nil || used.Running || len(used.Containers) != 1 || used.Containers[0].Info != containers[1] {
		t.Errorf("%+v, %v", used, err)
	}
}
