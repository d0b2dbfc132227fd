package launch

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/oci/confine"
	"berth/sandbox/lsm"
	"berth/sandbox/record"
)

// Labelling the files of a volume that hangs is waited for no longer than the caller has time, and shows among the waits.
func TestLabelMountsThatHang(t *testing.T) {
	waits := new(task.Waits)
	tasks := task.NewRunner(slog.New(slog.DiscardHandler), waits)
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	relabel := func(string, string) error {
		for _, w := range waits.List() {
			if w.Object != "container c" || w.Limit == 0 {
				t.Errorf("wait %+v", w)
			}
		}
		if len(waits.List()) == 0 {
			t.Error("no wait is noted")
		}
		cancel()
		<-release
		return nil
	}
	k := Kit{Tasks: tasks, SELinux: lsm.SELinux{Relabel: relabel}}
	c := Container{Rec: &record.Container{ID: "c", SELinux: confine.Labels{Process: "p", Mount: "files"}},
		Config: &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{{HostPath: t.TempDir(), ContainerPath: "/a", SelinuxRelabel: true}}}}
	if err := k.labelMounts(ctx, c); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	close(release)
	tasks.Operations.Close()
	if err := tasks.Operations.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}
