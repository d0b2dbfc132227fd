package attacks

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// The image's /proc is a link, so proc would be mounted at another place than the one that is
// masked and labelled. The container is refused.
func TestCVE_2023_27561_ProcIsASymlink(t *testing.T) {
	escape := machine.HostDir(t)
	name, _ := harness.Push(t, harness.Registry, "targets:proc", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.Symlink("proc", escape)}))
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Create(t, harness.Image(name))
	if err := d.Cri.StartContainer(t.Context(), c.Id); err == nil || !harness.Contains(err.Error(), "/proc") {
		t.Errorf("start of a container whose /proc is a link: %v", err)
	}
	harness.Equal(t, "files created on the host", fmt.Sprint(machine.ReadDir(escape)), "[]")
}

// Another container of the pod keeps swapping a mount target between a directory and a link. The
// mount never leads out of the container (CVE-2021-30465).
func TestCVE_2021_30465_MountTargetSwapped(t *testing.T) {
	host := machine.HostDir(t, "shared/target", "volume", "escape")
	target, escape := filepath.Join(host, "shared/target"), filepath.Join(host, "escape")
	other := filepath.Join(host, "shared/other")
	harness.Must(t, os.Symlink(escape, other))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	start := func() error {
		ctr := pod.Create(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/s", HostPath: filepath.Join(host, "shared")}),
			harness.Mount(&runtimeapi.Mount{ContainerPath: "/s/target/in", HostPath: filepath.Join(host, "volume")}))
		err := d.Cri.StartContainer(t.Context(), ctr.Id)
		harness.Must(t, d.Cri.RemoveContainer(t.Context(), ctr.Id))
		return err
	}
	for range 2 { // first the directory, then the link, which leads to a place in the container
		harness.Must(t, start())
		exchange(t, target, other)
	}
	race(t, target, other, func() bool { return start() == nil }) // may fail, because the target has changed meanwhile
	harness.Equal(t, "files created outside the container", fmt.Sprint(machine.ReadDir(escape)), "[]")
}

// race repeats an attempt while two files keep swapping places. It returns after a success and a
// refusal, or at a limit. The caller has tested each of the two files before.
func race(t *testing.T, one, other string, attempt func() (succeeded bool)) {
	t.Helper()
	const least, most = 10, 300
	stop := exchanging(t, one, other)
	succeeded, refused := 0, 0
	for n := 0; n < least || n < most && (succeeded == 0 || refused == 0); n++ {
		if attempt() {
			succeeded++
		} else {
			refused++
		}
	}
	t.Logf("%d attempts succeeded, %d were refused, in %d exchanges", succeeded, refused, stop())
}

// exchanging keeps swapping two files until stop is called. stop returns the number of swaps.
func exchanging(t *testing.T, one, other string) (stop func() int) {
	t.Helper()
	times, done, stopped := 0, make(chan error, 1), make(chan struct{})
	go func() {
		for {
			select {
			case <-stopped:
				done <- nil
				return
			default:
			}
			if err := unix.Renameat2(unix.AT_FDCWD, one, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE); err != nil {
				done <- err
				return
			}
			times++
		}
	}()
	return func() int {
		t.Helper()
		close(stopped)
		harness.Must(t, <-done)
		return times
	}
}

// exchange swaps two files atomically.
func exchange(t *testing.T, one, other string) {
	t.Helper()
	harness.Must(t, unix.Renameat2(unix.AT_FDCWD, one, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE))
}
