package upgrade

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/erofs"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

var write = flag.Bool("write", false, "write the golden files that do not exist")

// goldenDir is the directory of the daemon that wrote the golden files, because records contain
// paths.
const goldenDir = "/run/golden"

// golden describes a golden file: the objects that its daemon listed.
type golden struct {
	BootID     string
	Image      string                     // name
	ImageID    string                     // the same
	Pods       map[string]string          // name → ID, all ready
	Containers map[string]goldenContainer // by name
}

type goldenContainer struct {
	ID       string
	State    runtimeapi.ContainerState
	ExitCode int32
	ImageRef string // with a repository digest; empty before 0.3.0, whose daemons then report the image's ID
}

const aboutFile = "about.json"

// The current daemon opens the state of each released version, in the same boot without any
// process, and after a reboot.
func TestGoldenState(t *testing.T) {
	for _, version := range released(t) {
		file := harness.Get(filepath.Abs("testdata/" + version + ".tar.gz"))(t)
		if *write {
			t.Run("write "+version, func(t *testing.T) { writeGolden(t, version, file) })
		}
		for name, sameBoot := range map[string]bool{"same boot": true, "after a reboot": false} {
			t.Run(version+" "+name, func(t *testing.T) { openGolden(t, file, sameBoot) })
		}
		t.Run(version+" on a disk that can have EROFS", func(t *testing.T) { openGoldenOnDisk(t, file) })
	}
}

// openGoldenOnDisk opens the state on a disk that supports EROFS. The images in the state are
// directories. New images become EROFS.
func openGoldenOnDisk(t *testing.T, file string) {
	if err := erofs.Probe("/var/tmp"); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
	d := openGolden(t, file, true, harness.WithLayerDriver("auto"))
	harness.Equal(t, "driver", harness.Get(d.Cri.Status(t.Context(), true))(t).Info["layerDriver"], `"erofs"`)
	directories := len(machine.ReadDir(filepath.Join(d.Root, "images/layers")))
	if directories == 0 {
		t.Error("the old image has no directory layers")
	}
	pod := d.RunPod(t, harness.HostNetwork)
	harness.Equal(t, "a container of a new image", pod.Sh(t, "echo fine"), "fine\n")
	pod.Remove(t)
	harness.Equal(t, "layers that are directories", len(machine.ReadDir(filepath.Join(d.Root, "images/layers"))), directories)
}

func openGolden(t *testing.T, file string, sameBoot bool, opts ...harness.DaemonOption) *harness.Daemon {
	d := emptyDaemon(t, opts...)
	tar(t, "-xzf", file, "-C", goldenDir)
	var g golden
	harness.Must(t, json.Unmarshal(harness.Get(os.ReadFile(filepath.Join(goldenDir, aboutFile)))(t), &g))
	harness.Must(t, os.Remove(filepath.Join(goldenDir, aboutFile)))
	if sameBoot {
		d.StartInBoot(t, g.BootID)
	} else {
		harness.Must(t, os.RemoveAll(d.State))
		d.Boot(t)
	}

	for name, id := range g.Pods {
		pod := &harness.Pod{D: d, Id: id}
		d.Objects = append(d.Objects, id)
		harness.Equal(t, "state of "+name, pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	}
	for name, want := range g.Containers {
		d.Objects = append(d.Objects, want.ID)
		checkContainer(t, d, name, g.ImageID, want, sameBoot)
	}
	image := d.ImageStatus(t, g.Image)
	if image == nil || image.Id != g.ImageID {
		t.Fatalf("the image is %v, want %s", image, g.ImageID)
	}
	pod := d.RunPod(t, harness.HostNetwork, harness.PodNamed("new"))
	c := pod.Run(t, harness.Image(g.ImageID), harness.ImageDefaults)
	c.WaitStoppable(t)
	c.Stop(t, 30)
	harness.Equal(t, "exit code of a new container of the old image", c.Status(t).ExitCode, 0)
	pod.Remove(t)
	for _, id := range g.Pods {
		(&harness.Pod{D: d, Id: id}).Remove(t)
	}
	return d
}

// checkContainer compares a container with the golden file. A running container has lost its
// monitor. After a reboot a created container has lost its pod.
func checkContainer(t *testing.T, d *harness.Daemon, name, imageID string, want goldenContainer, sameBoot bool) {
	t.Helper()
	response := harness.Get(d.Cri.ContainerStatus(t.Context(), want.ID, false))(t)
	got := response.Status
	if want.State == runtimeapi.ContainerState_CONTAINER_RUNNING || want.State == runtimeapi.ContainerState_CONTAINER_CREATED && !sameBoot {
		want.State, want.ExitCode = runtimeapi.ContainerState_CONTAINER_EXITED, 255
	}
	harness.Equal(t, "name", got.Metadata.Name, name)
	harness.Equal(t, name+": state", got.State, want.State)
	harness.Equal(t, name+": exit code", got.ExitCode, want.ExitCode)
	harness.Equal(t, name+": image_id", got.ImageId, imageID)
	harness.Equal(t, name+": image_ref", got.ImageRef, cmp.Or(want.ImageRef, imageID))
}

// emptyDaemon returns a daemon without state in the golden directory. It was started once, for the
// leak check.
func emptyDaemon(t *testing.T, opts ...harness.DaemonOption) *harness.Daemon {
	t.Helper()
	d := harness.StartDaemonIn(t, goldenDir, append(opts, rootWritten)...)
	d.Stop(t)
	d.LoseState(t)
	for _, name := range machine.ReadDir(d.Root) {
		harness.Must(t, os.RemoveAll(filepath.Join(d.Root, name)))
	}
	return d
}

// rootWritten makes the root appear at the recorded path, even if it is on another disk so that
// layers can be EROFS images.
func rootWritten(t *testing.T, d *harness.Daemon) {
	root := filepath.Join(goldenDir, "root")
	if d.Root == root {
		return
	}
	harness.Must(t, os.Mkdir(root, 0o711))
	harness.Must(t, unix.Mount(d.Root, root, "", unix.MS_BIND, ""))
	d.Root, d.Mounts = root, append(d.Mounts, root)
}

// writeGolden makes a released version create one object of each kind. It packs the state that is
// left after that version is killed.
func writeGolden(t *testing.T, version, file string) {
	if _, err := os.Stat(file); err == nil {
		return
	}
	bin := programs(t, version)
	d := emptyDaemon(t)
	d.UseVersion(t, bin, configure(t, version)...)
	d.Start(t)

	name, id := harness.Push(t, harness.Registry, "golden:1", goldenImage(t))
	pod, host := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	image := harness.Image(name)
	pod.Run(t, image, harness.ImageDefaults, harness.ContainerNamed("running"))
	host.Create(t, image, harness.ImageDefaults, harness.ContainerNamed("created"))
	stopped := host.Run(t, image, harness.ImageDefaults, harness.ContainerNamed("stopped"))
	stopped.WaitStoppable(t)
	stopped.Stop(t, 30)
	killed := host.Run(t, image, harness.ImageDefaults, harness.ContainerNamed("killed"))
	machine.KillProcess(t, killed.Pid(t))
	killed.WaitExited(t)
	if hasFeatures(version) {
		d.Pull(t, name)
		runFeatures(t, d, id, image, harness.ImageDefaults)
	}
	g := describe(t, d, name)
	d.Kill(t)
	harness.Must(t, os.WriteFile(filepath.Join(goldenDir, aboutFile), harness.Get(json.MarshalIndent(g, "", "\t"))(t), 0o600))
	harness.Must(t, os.MkdirAll(filepath.Dir(file), 0o755))
	// Sockets and mounted filesystems belong to the kernel and are not state.
	tar(t, "-czf", file, "-C", goldenDir, "--one-file-system", "--numeric-owner", "--exclude=sock", "--exclude=bin", "--exclude=shm/*", "root", "state", aboutFile)
	harness.Must(t, os.Remove(filepath.Join(goldenDir, aboutFile)))
	d.UseVersion(t, "")
	d.Start(t)
}

// goldenImage returns a small image whose layers contain every kind of entry.
func goldenImage(t *testing.T) v1.Image {
	t.Helper()
	pause := harness.Get(os.ReadFile("../../shim/payload/bin/pause"))(t)
	lower := fixture.Tree{fixture.Dir("etc", 0o755), fixture.File("etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\n"), fixture.File("etc/old", 0o600, "old").Owned(5, 6),
		fixture.File("pause", 0o755, string(pause)), fixture.Hardlink("pause2", "pause"), fixture.Symlink("link", "etc/passwd")}
	upper := fixture.Tree{fixture.Dir("etc", 0o755), fixture.Whiteout("etc/", "old"), fixture.File("capable", 0o755, "x").WithXattr("user.note", "kept")}
	return harness.Get(fixture.ImageOf(v1.Config{Entrypoint: []string{"/pause"}}, harness.PackLayer(t, lower, fixture.Gzip), harness.PackLayer(t, upper, fixture.Zstd)))(t)
}

func describe(t *testing.T, d *harness.Daemon, image string) golden {
	t.Helper()
	boot := machine.ReadLines("/proc/sys/kernel/random/boot_id")
	g := golden{BootID: boot[0], Image: image, ImageID: d.ImageStatus(t, image).Id, Pods: map[string]string{}, Containers: map[string]goldenContainer{}}
	for _, p := range harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t) {
		g.Pods[p.Metadata.Name] = p.Id
	}
	for _, c := range harness.Get(d.Cri.ListContainers(t.Context(), nil))(t) {
		status := harness.Get(d.Cri.ContainerStatus(t.Context(), c.Id, false))(t).Status
		g.Containers[c.Metadata.Name] = goldenContainer{ID: c.Id, State: status.State, ExitCode: status.ExitCode, ImageRef: status.ImageRef}
	}
	return g
}

func tar(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.Command("tar", slices.Concat([]string{"--xattrs", "--xattrs-include=*"}, args)...).CombinedOutput()
	if err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
}
