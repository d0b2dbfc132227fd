package checkpoint

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// runLarge starts a container that counts and has some megabytes of memory.
func runLarge(t *testing.T, d *harness.Daemon) (*harness.Pod, *harness.Container) {
	t.Helper()
	pod := d.RunPod(t)
	c := pod.Run(t, harness.ContainerNamed("large"), harness.Script("x=$(head -c 3000000 /dev/zero | tr '\\0' x)\n"+countingTree))
	goesOn(t, c)
	return pod, c
}

// besideRoot makes a directory on the filesystem of the daemon's root.
func besideRoot(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	dir, err := os.MkdirTemp(filepath.Dir(d.Root), "checkpoint-")
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(dir)) })
	return dir
}

// insertsRanges skips a test if the filesystem of a directory cannot insert into files.
func insertsRanges(t *testing.T, dir string) {
	t.Helper()
	f, err := os.CreateTemp(dir, "")
	harness.Must(t, err)
	defer f.Close()
	defer func() { harness.Must(t, os.Remove(f.Name())) }()
	harness.Must(t, f.Truncate(1<<20))
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_INSERT_RANGE, 0, 4096); err != nil {
		t.Skipf("NOT TESTED: %s cannot insert into files: %v", dir, err)
	}
}

func checkpointContainer(t *testing.T, d *harness.Daemon, c *harness.Container, place string) error {
	t.Helper()
	_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(), &runtimeapi.CheckpointContainerRequest{ContainerId: c.Id, Location: place})
	return err
}

// memoryOffset returns where the content of the memory begins in a tar.
func memoryOffset(t *testing.T, place string) int64 {
	t.Helper()
	file, err := os.Open(place)
	harness.Must(t, err)
	defer file.Close()
	for r := tar.NewReader(file); ; {
		h, err := r.Next()
		harness.Must(t, err)
		if h.Name != "checkpoint/pages-1.img" {
			continue
		}
		at, err := file.Seek(0, io.SeekCurrent)
		harness.Must(t, err)
		return at
	}
}

// The tar of a large container on the filesystem of berth's root is the file that CRIU has written.
// A pod continues from it.
func TestCheckpointContainerInPlace(t *testing.T) {
	d := startDaemon(t)
	pod, c := runLarge(t, d)
	place := filepath.Join(besideRoot(t, d), "archive.tar")
	for range 2 { // the second replaces the first
		harness.Must(t, checkpointContainer(t, d, c, place))
	}
	info, err := os.Lstat(place)
	harness.Must(t, err)
	harness.Equal(t, "mode", info.Mode(), 0o600)
	if at := memoryOffset(t, place); at%4096 != 0 {
		t.Errorf("the memory begins at %d", at)
	}
	goesOn(t, c)
	s := &saved{d, &runtimeapi.RestorePodRequest{CheckpointPath: place, Config: pod.Config, ContainerConfigs: []*runtimeapi.ContainerConfig{c.Config}}}
	_, restored := restorePod(t, d, s.identity(t))
	restored[0].Start(t)
	goesOn(t, restored[0])
}

// A daemon that dies while it makes the tar leaves none, or the whole one.
func TestDaemonIsKilledWhileItMakesTar(t *testing.T) {
	for _, point := range []string{"checkpoint.insert-room", "checkpoint.room-inserted", "checkpoint.archive-protected",
		"checkpoint.link-archive", "checkpoint.archive-linked"} {
		t.Run(point, func(t *testing.T) {
			var f harness.Failpoints
			d := startDaemon(t, harness.WithFailpoints(&f))
			_, c := runLarge(t, d)
			dir := besideRoot(t, d)
			insertsRanges(t, dir)
			place := filepath.Join(dir, "archive.tar")
			f.Kill(t, d, point, 1)
			if err := checkpointContainer(t, d, c, place); err == nil {
				t.Fatal("the daemon was not killed")
			}
			if !d.WaitKilled(t, harness.Patience) {
				t.Fatal("the daemon was not killed")
			}
			goesOn(t, c) // without a daemon
			d.Start(t)
			if _, err := os.Lstat(place); !errors.Is(err, os.ErrNotExist) {
				harness.Must(t, err)
				memoryOffset(t, place)
			}
			killed(t, d, outputDir(t, d), []*harness.Container{c})
			harness.Must(t, checkpointContainer(t, d, c, place))
			memoryOffset(t, place)
		})
	}
}
