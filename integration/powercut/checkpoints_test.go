package powercut

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/integration/harness"
)

// saved is a checkpoint on a disk.
type saved struct {
	path     string // below the mount point
	complete string // the file of which the existence means that the checkpoint is complete
	done     int    // position at which the daemon has reported success
}

// TestPowerCutDuringCheckpoint cuts the power during and after checkpoints of a pod and of a
// container. A checkpoint whose manifest or file has its name is complete. One that the daemon has
// reported is there.
func TestPowerCutDuringCheckpoint(t *testing.T) {
	withCRIU := harness.WithCRIU(t)
	for _, f := range filesystems {
		t.Run(f.name, func(t *testing.T) {
			f.usable(t)
			random := rand.New(rand.NewPCG(seed(t), 0))
			d := harness.StartDaemon(t, withCRIU)
			dir := makeDir(t, d.Dir, "disk")
			r, all := f.recordCheckpoints(t, d, dir)
			key := harness.Get(archive.ReadKey(d.Root))(t)
			found := 0
			for i := range 4 * f.cuts(t) {
				c := r.choose(random)
				t.Run(fmt.Sprint(i), func(t *testing.T) {
					t.Logf("the power fails at %v", c)
					m := f.mount(t, c.of(t, r.disk), dir)
					for _, s := range all {
						if s.survives(t, dir, key, c.position) {
							found++
						}
					}
					m.unmount(t)
				})
			}
			t.Logf("%d complete checkpoints on %d disks", found, 4*f.cuts(t))
		})
	}
}

// recordCheckpoints makes checkpoints on a new disk that is mounted at dir.
func (f filesystem) recordCheckpoints(t *testing.T, d *harness.Daemon, dir string) (r recording, all []saved) {
	t.Helper()
	r.disk = f.newDisk(t)
	m := f.mount(t, r.disk, dir)
	r.begin = r.disk.Position()
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Script("echo x >/file; echo y >/dev/shm/file; echo ready; exec sleep 100000"))
	c.WaitOutput(t, "ready")
	rpc := harness.RawRuntime(t, d)
	for i := range 2 {
		name := fmt.Sprint("pod-", i)
		makeDir(t, dir, name)
		harness.Get(rpc.CheckpointPod(t.Context(), &runtimeapi.CheckpointPodRequest{PodSandboxId: pod.Id,
			OutputPath: filepath.Join(dir, name), ContainerIds: []string{c.Id}}))(t)
		all = append(all, saved{name, filepath.Join(name, archive.ManifestFile), r.disk.Position()})
		const file = "container.tar" // the second checkpoint replaces the first
		harness.Get(rpc.CheckpointContainer(t.Context(), &runtimeapi.CheckpointContainerRequest{ContainerId: c.Id,
			Location: filepath.Join(dir, file), Timeout: 60}))(t)
		all = append(all, saved{file, file, r.disk.Position()})
	}
	pod.Remove(t)
	m.unmount(t)
	return r, all
}

// survives checks a checkpoint after a power failure at a position, and reports whether it is
// there. The directory of a pod's checkpoint is the client's, which syncs its name.
func (s saved) survives(t *testing.T, dir string, key *archive.Key, position int) bool {
	t.Helper()
	_, err := os.Stat(filepath.Join(dir, s.complete))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(filepath.Join(dir, s.path)); position >= s.done && (err == nil || s.path == s.complete) {
			t.Errorf("%s is missing, it was reported at %d", s.complete, s.done)
		}
		return false
	}
	harness.Must(t, err)
	from := harness.Get(os.Open(filepath.Join(dir, s.path)))(t)
	to := harness.Get(os.Open(t.TempDir()))(t)
	a, err := archive.Import(t.Context(), from, to, key)
	if err := errors.Join(err, from.Close(), to.Close()); err != nil {
		t.Errorf("%s is not complete: %v", s.path, err)
		return false
	}
	harness.Equal(t, "signer", a.Signer, archive.ThisNode)
	return true
}
