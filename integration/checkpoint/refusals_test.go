package checkpoint

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// peers returns a function that makes the option for a container that runs testdata/peers.c.
func peers(t *testing.T) func(args ...string) harness.ContainerOption {
	t.Helper()
	path := program(t, "peers")
	return func(args ...string) harness.ContainerOption {
		return func(c *runtimeapi.ContainerConfig) {
			c.Command = append([]string{"/peers"}, args...)
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/peers", HostPath: path, Readonly: true})
		}
	}
}

// What CRIU cannot dump is refused with the cause in words, and the containers go on.
func TestUndumpableIsRefused(t *testing.T) {
	d := startDaemon(t)
	program := peers(t)
	refused := func(t *testing.T, want string, pod *harness.Pod, list ...*harness.Container) {
		t.Helper()
		dir := outputDir(t, d)
		harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.FailedPrecondition, want)
		isEmpty(t, dir)
		for _, c := range list {
			harness.Equal(t, "state afterwards", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
			harness.Equal(t, "exec afterwards", c.Exec(t, "echo", "runs"), "runs")
		}
		pod.Remove(t)
	}
	t.Run("connected unix socket", func(t *testing.T) {
		shared := filepath.Join(d.Dir, "peers")
		harness.Must(t, os.Mkdir(shared, 0o755))
		pod := d.RunPod(t)
		volume := harness.Mount(&runtimeapi.Mount{HostPath: shared, ContainerPath: "/shared"})
		server := pod.Run(t, program("serve", "/shared/socket"), volume, harness.ContainerNamed("server"))
		server.WaitOutput(t, "listening")
		client := pod.Run(t, program("connect", "/shared/socket"), volume, harness.ContainerNamed("client"))
		server.WaitOutput(t, "ready")
		client.WaitOutput(t, "ready")
		refused(t, "unix socket that is connected to another container", pod, server, client)
	})
	t.Run("io_uring", func(t *testing.T) {
		pod := d.RunPod(t)
		c := pod.Create(t, program("io_uring"))
		c.Start(t)
		harness.EventuallyTrue(t, "it is ready or has ended", func() bool {
			return written(t, c) != "" || c.Status(t).State == runtimeapi.ContainerState_CONTAINER_EXITED
		})
		if c.Status(t).State == runtimeapi.ContainerState_CONTAINER_EXITED {
			t.Skipf("NOT TESTED: no io_uring: %s", written(t, c))
		}
		refused(t, "uses io_uring", pod, c)
	})
	for name, test := range map[string]struct{ script, want string }{
		"deleted file with another link": {"echo x >/a; ln /a /b; exec 7</a; rm /a", "deleted open file with another link"},
		"large deleted file":             {"dd if=/dev/zero of=/a bs=1M count=257 2>/dev/null; exec 7</a; rm /a", "deleted open file larger than 256 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script(test.script+"; "+counting))
			waitCounted(t, c, 1)
			refused(t, test.want, pod, c)
		})
	}
}

// runsAfterRefusal expects that a checkpoint is refused, and that nothing is left.
func runsAfterRefusal(t *testing.T, want string, pod *harness.Pod, c *harness.Container) {
	t.Helper()
	dir := outputDir(t, pod.D)
	harness.WantCode(t, checkpointPod(t, pod, dir, c), codes.FailedPrecondition, want)
	isEmpty(t, dir)
	harness.Equal(t, "state afterwards", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

// A terminal cannot be saved while a client is attached to it.
func TestAttachedTerminalIsRefused(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("while read x; do echo got $x; done"), harness.WithTerminal)
	reading(t, c)
	client, _ := attachTerminal(t, c)
	client.Send(t, "one\n")
	client.Stdout.WaitFor(t, "got one")
	runsAfterRefusal(t, "a client is attached to its terminal", pod, c)
	client.Send(t, "two\n")
	client.Stdout.WaitFor(t, "got two")
	client.HangUp()
	<-client.Ended
	harness.Eventually(t, "a checkpoint succeeds without the client", func() error { return checkpointPod(t, pod, outputDir(t, d), c) })
}

// A second checkpoint of a container waits for the first, of the pod or of itself.
func TestSecondCheckpointWaits(t *testing.T) {
	var f harness.Failpoints
	d := startDaemon(t, harness.WithFailpoints(&f))
	pod, list := run(t, d, "one")
	place := filepath.Join(outputDir(t, d), "archive.tar")
	f.FreezeNext(t, harness.LauncherProgram, "launcher.dump-ordered", 1)
	first := harness.Go(func() error { return checkpointPod(t, pod, outputDir(t, d), list...) })
	if !f.WaitReached(harness.Patience) {
		f.Disarm()
		t.Fatal("the point was not reached")
	}
	second := harness.Go(func() error { return checkpointPod(t, pod, outputDir(t, d), list...) })
	third := harness.Go(func() error { return checkpointContainer(t, d, list[0], place) })
	for _, ended := range []<-chan error{first, second, third} {
		var err error
		harness.EventuallyTrue(t, "the checkpoint ends", func() bool {
			machine.ContinueAll() // again: the launcher stops after it was reported
			select {
			case err = <-ended:
				return true
			default:
				return false
			}
		})
		harness.Must(t, err)
	}
	goesOn(t, list[0])
}

// A process in uninterruptible sleep cannot be saved: its container does not freeze, or CRIU cannot
// stop it. The kernel decides which. Here it changes a mapped file of a filesystem that is frozen.
// The other containers run on.
func TestUnfreezableIsRefused(t *testing.T) {
	d := startDaemon(t)
	disk := frozenDisk(t)
	volume := harness.Mount(&runtimeapi.Mount{HostPath: disk.path, ContainerPath: "/volume"})
	pod := d.RunPod(t)
	list := []*harness.Container{pod.Run(t, countsIn("one")...)}
	for _, turn := range []string{"0", "1"} {
		list = append(list, pod.Run(t, runs(t, "peers", "memory", "/volume/number", turn), volume))
	}
	exchanged(t, list[1:], 3)
	disk.freeze(t)
	harness.EventuallyTrue(t, "one of them hangs", func() bool {
		return slices.ContainsFunc(list[1:], func(c *harness.Container) bool {
			return strings.HasPrefix(machine.StatusField(t, c.Pid(t), "State"), "D")
		})
	})
	dir := outputDir(t, d)
	harness.WantCode(t, checkpointPod(t, pod, dir, list...), codes.FailedPrecondition, "is in uninterruptible sleep")
	isEmpty(t, dir)
	goesOn(t, list[0])
	disk.thaw(t)
	exchanged(t, list[1:], 3)
	harness.Must(t, checkpointPod(t, pod, dir, list...))
	pod.Remove(t)
}

// loopDisk is a mounted ext4 on a loop device.
type loopDisk struct {
	path   string
	frozen *os.File // its root; nil if it is not frozen
}

// frozenDisk mounts a disk that can be frozen.
func frozenDisk(t *testing.T) *loopDisk {
	t.Helper()
	disk := &loopDisk{path: machine.HostDir(t)}
	image := filepath.Join(t.TempDir(), "disk.img")
	harness.Must(t, os.WriteFile(image, nil, 0o600))
	harness.Must(t, os.Truncate(image, 16<<20))
	for _, command := range [][]string{{"mkfs.ext4", "-q", image}, {"mount", "-o", "loop", image, disk.path}} {
		if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Skipf("NOT TESTED: no disk on a loop device: %v: %s", err, out)
		}
	}
	t.Cleanup(func() {
		disk.thaw(t)
		harness.Must(t, unix.Unmount(disk.path, unix.MNT_DETACH))
	})
	return disk
}

// Requests of ioctl_fs_freeze(2), linux/fs.h.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// freeze makes writers to the disk wait in uninterruptible sleep.
func (k *loopDisk) freeze(t *testing.T) {
	t.Helper()
	k.frozen = harness.Get(os.Open(k.path))(t)
	harness.Must(t, unix.IoctlSetInt(int(k.frozen.Fd()), fiFreeze, 0))
}

func (k *loopDisk) thaw(t *testing.T) {
	t.Helper()
	if k.frozen != nil {
		harness.Must(t, unix.IoctlSetInt(int(k.frozen.Fd()), fiThaw, 0))
		harness.Must(t, k.frozen.Close())
		k.frozen = nil
	}
}

// Where the kernel renames directories of the image (redirect_dir), the writable layer has only
// their new names. The attribute is the one that overlayfs writes then.
func TestRenamedDirectoryIsRefused(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.ContainerNamed("one"), harness.Script("mkdir /renamed; "+countingTree))
	goesOn(t, c)
	renamed := filepath.Join(d.Root, "rootfs", c.Id, "upper/renamed")
	const attribute = "trusted.overlay.redirect"
	harness.Must(t, unix.Lsetxattr(renamed, attribute, []byte("/etc"), 0))
	runsAfterRefusal(t, "renamed has the attribute "+attribute, pod, c)
	goesOn(t, c)
	harness.Must(t, unix.Lremovexattr(renamed, attribute))
	harness.Must(t, checkpointPod(t, pod, outputDir(t, d), c))
}

// oldCRIU names a CRIU that is too old, for example Debian 12's.
const oldCRIU = "BERTH_TEST_OLD_CRIU"

// An old CRIU is refused with the version that is needed.
func TestOldCRIUIsRefused(t *testing.T) {
	old := os.Getenv(oldCRIU)
	if old == "" {
		t.Skipf("NOT TESTED: no old CRIU (%s)", oldCRIU)
	}
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("checkpoint.criu = %q", old)))
	pod, list := run(t, d, "one")
	runsAfterRefusal(t, "is too old: 4.1.1 or later is needed", pod, list[0])
	goesOn(t, list[0])
}
