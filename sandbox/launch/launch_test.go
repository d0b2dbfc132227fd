package launch

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/oci/confine"
	"berth/sandbox/describe"
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
	if len(waits.List()) != 1 {
		t.Errorf("when the caller has gone the waits are %v", waits.List())
	}
	close(release)
	tasks.Operations.Close()
	if err := tasks.Operations.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

// A volume that hangs while a container is described shows among the waits, whoever asked for that and whether he still waits.
func TestDescribingShowsAmongTheWaits(t *testing.T) {
	waits := new(task.Waits)
	k := Kit{Tasks: task.NewRunner(slog.New(slog.DiscardHandler), waits)}
	var during []task.Wait
	enough := errors.New("enough")
	look := func() (string, error) { during = waits.List(); return "", enough }
	if _, err := k.Spec(describe.Pod{}, Container{Rec: &record.Container{ID: "c"}, TargetPIDNS: look}); !errors.Is(err, enough) {
		t.Fatal(err)
	}
	if len(during) != 1 || during[0].Object != "container c" || during[0].Limit == 0 {
		t.Errorf("waits: %v", during)
	}
	if left := waits.List(); len(left) != 0 {
		t.Errorf("afterwards: %v", left)
	}
}
