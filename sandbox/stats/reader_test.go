package stats

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"testing"

	"berth/internal/cgstats"
	"berth/internal/testutil"
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

// The usage of a container whose processes the node does not see is what its runtime told last. It
// is part of the pause's, so a pod without a cgroup does not count it twice.
func TestUsageByRuntime(t *testing.T) {
	layers := t.TempDir()
	testutil.Must(t, os.MkdirAll(layers+"/a/upper", 0o700))
	sampler := NewSampler(SamplerConfig{Layers: layers, Images: layers, Log: slog.New(slog.DiscardHandler),
		Begin: func(string, string) func() { return func() {} }})
	testutil.Must(t, sampler.Locate())
	told, err := json.Marshal(cgstats.Sample{CPU: cgstats.CPU{Known: true, Usage: 5}, Memory: cgstats.Memory{Known: true, Usage: 7}})
	testutil.Must(t, err)
	var fails error
	target := &Target{ID: "a", State: &SampleState{}, Running: true,
		Usage: func(context.Context) ([]byte, error) { return told, fails }}
	testutil.Must(t, sampler.sample(t.Context(), target))
	last, measured := sampler.Last(target.State), &ContainerMeter{}
	var used Usage
	testutil.Must(t, measured.read(&used, last))
	if used.CPU.Usage != 5 || used.Memory.Usage != 7 {
		t.Errorf("%+v", used)
	}
	for u := range usages([]ContainerUsage{{Usage: used, sandboxed: true}}) {
		t.Errorf("it is added to its pod: %+v", u)
	}
	fails = errors.New("it hangs")
	if err := sampler.sample(t.Context(), target); !errors.Is(err, fails) {
		t.Errorf("the runtime failed: %v", err)
	}
	testutil.Must(t, measured.read(&used, sampler.Last(target.State)))
	if used.CPU.Known || used.Memory.Known {
		t.Errorf("after the runtime has failed: %+v", used)
	}
}
