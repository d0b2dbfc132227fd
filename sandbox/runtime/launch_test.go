package runtime

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/internal/testutil"
	"berth/oci/confine"
	"berth/sandbox/lsm"
	"berth/sandbox/state"
)

// When a volume hangs, labelMounts returns with ctx and the wait stays listed. One goroutine blocks
// for all callers. Other volumes are labelled.
func TestLabelMountsWithHangingVolume(t *testing.T) {
	waits := new(task.Waits)
	tasks := task.NewRunner(slog.New(slog.DiscardHandler), waits)
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	var hanging atomic.Int32
	var labelled []string
	relabel := func(source, _ string) error {
		if source == "/dead" && hanging.Add(1) == 1 {
			for _, w := range waits.List() {
				if w.Object != "volume /dead" && w.Object != "/dead" || w.Limit == 0 {
					t.Errorf("wait %+v", w)
				}
			}
			cancel()
			<-release
		}
		labelled = append(labelled, source)
		return nil
	}
	k := Launcher{Tasks: tasks, SELinux: lsm.SELinux{Relabel: relabel}, Sources: NewSources(tasks)}
	labels := confine.Labels{Process: "p", Mount: "files"}
	for range 3 {
		if err := k.labelMounts(ctx, []string{"/dead", "/after"}, labels); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	}
	if n := hanging.Load(); n != 1 || len(waits.List()) == 0 {
		t.Errorf("after the callers left: %d calls hang, waits %v", n, waits.List())
	}
	testutil.Must(t, k.labelMounts(t.Context(), []string{"/alive"}, labels))
	close(release)
	if err := k.labelMounts(t.Context(), []string{"/dead"}, labels); err != nil { // labels the volume again
		t.Error(err)
	}
	if want := []string{"/alive", "/dead", "/dead"}; !slices.Equal(labelled, want) {
		t.Errorf("labelled %v, want %v", labelled, want)
	}
	tasks.Watchers.Close()
	testutil.Must(t, tasks.Watchers.Wait(t.Context()))
	if len(k.Sources.busy) != 0 || len(waits.List()) != 0 {
		t.Errorf("left: %v, %v", k.Sources.busy, waits.List())
	}
}

// Labelling starts no volume for a cancelled creation, because a volume is always labelled
// completely.
func TestCancelledCreationLabelsNothing(t *testing.T) {
	tasks := task.NewRunner(slog.New(slog.DiscardHandler), nil)
	relabel := func(source, _ string) error { t.Errorf("%s was labelled", source); return nil }
	k := Launcher{Tasks: tasks, SELinux: lsm.SELinux{Relabel: relabel}, Sources: NewSources(tasks)}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.labelMounts(ctx, []string{"/volume"}, confine.Labels{Process: "p", Mount: "files"}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	tasks.Watchers.Close()
	if err := tasks.Watchers.Wait(t.Context()); err != nil || len(k.Sources.busy) != 0 {
		t.Errorf("left: %v, %v", k.Sources.busy, err)
	}
}

// A detached step outlives its caller, even while berth shuts down.
func TestDetachedStepOutlivesItsCaller(t *testing.T) {
	tasks := task.NewRunner(slog.New(slog.DiscardHandler), nil)
	k := Launcher{Tasks: tasks, Sources: NewSources(tasks)}
	tasks.Operations.Close() // a current start continues during the shutdown
	ctx, cancel := context.WithCancel(t.Context())
	c := &state.Container{ContainerSpec: &state.ContainerSpec{ID: "c", Config: &runtimeapi.ContainerConfig{
		Mounts: []*runtimeapi.Mount{{HostPath: t.TempDir()}, {HostPath: "/not/there"}, {HostPath: "not absolute"}, {Image: &runtimeapi.ImageSpec{Image: "x"}}}}}}
	proceed, ended := make(chan struct{}), make(chan struct{})
	err := k.detached(ctx, c, "inspect", func() error {
		cancel()
		<-proceed
		close(ended)
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	close(proceed)
	<-ended
}

// The wait for a hanging volume is listed until the inspection ends, even after the caller left.
func TestDescribeIsListedAsWait(t *testing.T) {
	waits := new(task.Waits)
	var during []task.Wait
	k := Launcher{Tasks: task.NewRunner(slog.New(slog.DiscardHandler), waits),
		AppArmor: fakeProfiles{during: func() { during = waits.List() }}}
	pod := &state.Pod{PodSpec: &state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{}}}
	c := &state.Container{ContainerSpec: &state.ContainerSpec{ID: "c", Config: &runtimeapi.ContainerConfig{}}}
	_, _ = k.describe(t.Context(), pod, c, func() (string, error) { return "", nil }) // fails because the config has no command
	if len(during) != 1 || during[0].Object != "container c" || during[0].Limit == 0 {
		t.Errorf("waits: %v", during)
	}
	if left := waits.List(); len(left) != 0 {
		t.Errorf("afterwards: %v", left)
	}
}
