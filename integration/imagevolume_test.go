package integration

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/registry/registrytest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// volumeImage pushes an image of two layers without programs: a model, and links that try to lead
// out of it.
func volumeImage(t *testing.T, tag string) (name, id string) {
	t.Helper()
	img, err := fixture.ImageOf(v1.Config{},
		harness.PackLayer(t, fixture.Tree{
			fixture.Dir("model", 0o755), fixture.File("model/weights", 0o644, "42 "+tag+"\n"),
			fixture.File("model/run", 0o755, "#!/bin/sh\necho ran\n"), fixture.File("replaced", 0o644, "old\n"),
		}, fixture.Gzip),
		harness.PackLayer(t, fixture.Tree{
			fixture.File("replaced", 0o644, "new\n"), fixture.Symlink("latest", "/model"), fixture.Symlink("up", "../../../../model"),
			fixture.Symlink("outside", "/proc/self/root/etc"), fixture.Symlink("loop", "loop"), fixture.CharDevice("null", 0o666, 1, 3),
		}, fixture.Gzip))
	harness.Must(t, err)
	return harness.Push(t, harness.Registry, "volume:"+tag, img)
}

// imageVolume mounts an image at /v as kubelet requests it: by the ID from PullImage.
func imageVolume(id, subPath string) *runtimeapi.Mount {
	return &runtimeapi.Mount{ContainerPath: "/v", Readonly: true, ImageSubPath: subPath, Image: &runtimeapi.ImageSpec{Image: id}}
}

func TestImageVolume(t *testing.T) {
	name, id := volumeImage(t, "content")
	d := harness.StartDaemon(t)
	d.Tolerate("denied  { remount }") // below, by SELinux
	harness.Equal(t, "pulled ID", d.Pull(t, name), id)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Mount(imageVolume(id, "")))
	harness.Equal(t, "content", c.Exec(t, "sh", "-c", "cat /v/model/weights /v/replaced"), "42 content\nnew")
	harness.Equal(t, "a program of the volume", c.Exec(t, "/v/model/run"), "ran")
	for _, script := range []string{"echo x >/v/model/weights", "touch /v/new", "mount -o remount,rw /v"} {
		if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", script}, 0); err == nil {
			t.Errorf("%q succeeded", script)
		}
	}
	reported := c.Status(t)
	harness.Equal(t, "image of the mount in the status", reported.Mounts[0].Image.GetImage(), id)
	harness.Equal(t, "image ID in the status", reported.Mounts[0].Image.GetImageRef(), id)
	for _, m := range machine.Mountpoints(t, 1) {
		if harness.Contains(m, c.Id) {
			t.Errorf("the host has a mount at %s", m)
		}
	}
	harness.Equal(t, "content in a container of another image mounted by name",
		pod.Sh(t, "cat /v/replaced", harness.Mount(imageVolume(name, ""))), "new\n")
	options := imageVolume(id, "")
	options.MountOptions = []string{"noexec"}
	harness.Equal(t, "a program with noexec", pod.Sh(t, "/v/model/run 2>/dev/null || echo refused", harness.Mount(options)), "refused\n")
}

// The program of an image without layers is in a volume. Such an image is no volume itself.
func TestImageWithoutLayers(t *testing.T) {
	img := harness.Get(fixture.ImageOf(v1.Config{Env: []string{"PATH=/v/bin"}}))(t)
	name, id := harness.Push(t, harness.Registry, "nothing:latest", img)
	base, _ := harness.Push(t, harness.Registry, "programs:latest", harness.Get(fixture.ImageOf(v1.Config{}, harness.Get(fixture.Base())(t)))(t))
	d := harness.StartDaemon(t)
	d.Pull(t, base)
	pod := d.RunPod(t, harness.HostNetwork)
	harness.Equal(t, "output of another user", pod.Sh(t, "",
		harness.Image(name), harness.Mount(imageVolume(base, "")), harness.RunAs(1000), harness.Command("/v/bin/sh", "-c", "/v/bin/stat -c %a /; echo from the volume")),
		"755\nfrom the volume\n")
	_, err := pod.TryCreate(t, harness.Mount(imageVolume(id, "")))
	harness.WantCode(t, err, codes.FailedPrecondition, "no files")
}

// A sub path, including links, is resolved with the image as the root.
func TestImageVolumeSubPath(t *testing.T) {
	_, id := volumeImage(t, "subpath")
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Registry.Host+"/volume:subpath")
	pod := d.RunPod(t, harness.HostNetwork)
	for _, c := range []struct{ path, file string }{
		{"model", "/v/weights"}, {"/model/", "/v/weights"}, {"model/weights", "/v"}, {"latest", "/v/weights"},
		{"up", "/v/weights"}, {"../../model", "/v/weights"}, {"latest/weights", "/v"},
	} {
		harness.Equal(t, "content of "+c.path, pod.Sh(t, "cat "+c.file+"; test ! -e /v/replaced", harness.Mount(imageVolume(id, c.path))), "42 subpath\n")
	}
	for _, path := range []string{"missing", "model/missing", "replaced/below", "outside", "loop", "null", strings.Repeat("x", 256)} {
		_, err := pod.TryCreate(t, harness.Mount(imageVolume(id, path)))
		harness.WantCode(t, err, codes.InvalidArgument, "/v", path)
		wantReason(t, err, "ImageVolumeMountFailed: ")
	}
	harness.Equal(t, "number of containers", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 7)
}

// wantReason checks the beginning of an error's text, by which kubelet recognizes the reason.
func wantReason(t *testing.T, err error, reason string) {
	t.Helper()
	var s interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &s) || !strings.HasPrefix(s.GRPCStatus().Message(), reason) {
		t.Errorf("the error does not begin with %q: %v", reason, err)
	}
}

func TestImageVolumeRefused(t *testing.T) {
	_, id := volumeImage(t, "refused")
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Registry.Host+"/volume:refused")
	pod := d.RunPod(t, harness.HostNetwork)
	for _, c := range []struct {
		name   string
		change func(*runtimeapi.Mount)
		code   codes.Code
	}{
		{"unknown image", func(m *runtimeapi.Mount) { m.Image.Image = "sha256:" + strings.Repeat("0", 64) }, codes.NotFound},
		{"writable", func(m *runtimeapi.Mount) { m.Readonly = false }, codes.InvalidArgument},
		{"host path as well", func(m *runtimeapi.Mount) { m.HostPath = "/" }, codes.InvalidArgument},
		{"bidirectional", func(m *runtimeapi.Mount) { m.Propagation = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL }, codes.InvalidArgument},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := imageVolume(id, "")
			c.change(m)
			_, err := pod.TryCreate(t, harness.Mount(m))
			harness.WantCode(t, err, c.code)
			wantReason(t, err, "ImageVolumeMountFailed: ")
		})
	}
}

// The layers of a volume's image exist as long as the container, even after the image's removal and
// across daemons. They are removed with the container.
func TestImageVolumeOutlivesImageAndDaemon(t *testing.T) {
	_, id := volumeImage(t, "held")
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Registry.Host+"/volume:held")
	pod := d.RunPod(t, harness.HostNetwork)
	running := pod.Run(t, harness.Mount(imageVolume(id, "model")))
	created := pod.Create(t, harness.Mount(imageVolume(id, "")))
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: id}))
	if got := d.ImageStatus(t, id); got != nil {
		t.Errorf("the removed image still exists: %v", got)
	}
	harness.Equal(t, "content without the image", running.Exec(t, "cat", "/v/weights"), "42 held")
	d.Kill(t)
	d.Start(t)
	harness.Equal(t, "content after a restart", running.Exec(t, "cat", "/v/weights"), "42 held")
	harness.Equal(t, "image ID after a restart", running.Status(t).Mounts[0].Image.GetImageRef(), id)
	created.Start(t)
	harness.Equal(t, "content in the container created before", created.Exec(t, "cat", "/v/replaced"), "new")
	_, err := pod.TryCreate(t, harness.Mount(imageVolume(id, "")))
	harness.WantCode(t, err, codes.NotFound, id)
}

// Containers share the layers. Even a privileged container, which may remount, cannot write to
// them.
func TestImageVolumeOfPrivilegedContainer(t *testing.T) {
	single := harness.Get(fixture.ImageOf(v1.Config{}, harness.PackLayer(t, fixture.Tree{fixture.File("file", 0o644, "content\n")}, fixture.Gzip)))(t)
	name, single1 := harness.Push(t, harness.Registry, "volume:single", single)
	_, several := volumeImage(t, "several")
	d := harness.StartDaemon(t)
	d.Pull(t, name)
	d.Pull(t, harness.Registry.Host+"/volume:several")
	pod := d.RunPod(t, harness.HostNetwork, privilegedPod)
	for _, id := range []string{single1, several} {
		harness.Equal(t, "output of a privileged container", pod.Sh(t,
			"for o in remount,rw remount,bind,rw; do mount -o $o /v 2>/dev/null; touch /v/new 2>/dev/null && echo written; done; true",
			harness.Security(harness.Privileged), harness.Mount(imageVolume(id, ""))), "")
	}
	harness.Equal(t, "content", pod.Sh(t, "ls -A /v; cat /v/file", harness.Mount(imageVolume(single1, ""))), "file\ncontent\n")
}

// A pod with a user namespace sees the owners in the image, and not those on the host.
func TestImageVolumeInUserNamespace(t *testing.T) {
	owned := fixture.Tree{fixture.Dir("dir", 0o700).Owned(1001, 2001), fixture.File("dir/file", 0o600, "content\n").Owned(1001, 2001)}
	img := harness.Get(fixture.ImageOf(v1.Config{}, harness.PackLayer(t, owned, fixture.Gzip)))(t)
	name, id := harness.Push(t, harness.Registry, "volume:owned", img)
	_, several := volumeImage(t, "mapped")
	d := harness.StartDaemon(t)
	d.Pull(t, name)
	d.Pull(t, harness.Registry.Host+"/volume:mapped")
	const hostID = 30 * usernsLength
	pod := d.RunPod(t, harness.HostNetwork, userNamespace(hostID))
	harness.Equal(t, "owners and content", pod.Sh(t, "stat -c %u:%g /v /v/file; cat /v/file; touch /v/new 2>/dev/null || echo read-only",
		inUserNamespace(hostID), harness.Mount(imageVolume(id, "dir"))), "1001:2001\n1001:2001\ncontent\nread-only\n")
	harness.Equal(t, "owner in an image of several layers", pod.Sh(t, "stat -c %u:%g /v/replaced; cat /v/replaced",
		inUserNamespace(hostID), harness.Mount(imageVolume(several, ""))), "0:0\nnew\n")
}

// A missing program is detected only after the volumes are mounted. The failed container leaves
// neither a mount nor a directory of a volume.
func TestImageVolumeOfContainerThatCannotStart(t *testing.T) {
	_, id := volumeImage(t, "startfails")
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Registry.Host+"/volume:startfails")
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t, harness.Command("/does/not/exist"), harness.Mount(imageVolume(id, "model")))
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), c.Id), codes.InvalidArgument, "/does/not/exist")
	if _, err := os.Stat(fmt.Sprintf("%s/c/%s", d.State, c.Id)); !os.IsNotExist(err) {
		t.Errorf("the shim directory is still there: %v", err)
	}
	harness.Equal(t, "another container runs", pod.Sh(t, "cat /v/weights", harness.Mount(imageVolume(id, "model"))), "42 startfails\n")
}

// The mounts of an image are removed when the container's last process exits.
func TestImageVolumeIsUnmountedWithContainer(t *testing.T) {
	_, id := volumeImage(t, "gone")
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Registry.Host+"/volume:gone")
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Mount(imageVolume(id, "")))
	harness.Must(t, syscall.Kill(c.Pid(t), syscall.SIGKILL))
	c.WaitExited(t)
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: id}))
	for _, pid := range machine.Processes() {
		for _, m := range machine.ReadLines(fmt.Sprintf("/proc/%d/mountinfo", pid)) {
			if harness.Contains(m, c.Id) {
				t.Errorf("process %d still has %s", pid, m)
			}
		}
	}
}

// An OCI artifact is a read-only directory with a file for each of its blobs, with each layer
// driver. A container cannot run it.
func TestArtifactVolume(t *testing.T) {
	for _, driver := range []string{"auto", "directory"} {
		t.Run(driver, func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutArtifact("model", "v1", "application/vnd.example.model", registrytest.File{Title: "config.json", Content: []byte("{}\n")},
				registrytest.File{Title: "weights/one.bin", Content: bytes.Repeat([]byte("weights\n"), 100_000)})
			name := reg.Host() + "/model:v1"
			d := harness.StartDaemon(t, harness.WithLayerDriver(driver))
			id := d.Pull(t, name)
			pod := d.RunPod(t, harness.HostNetwork)
			c := pod.Run(t, harness.Mount(imageVolume(id, "")))
			harness.Equal(t, "files", c.Exec(t, "sh", "-c", "cd /v; find . -type f | sort; cat config.json; wc -c <weights/one.bin; sort -u weights/one.bin"),
				"./config.json\n./weights/one.bin\n{}\n800000\nweights")
			for _, script := range []string{"echo x >/v/config.json", "touch /v/new", "rm /v/weights/one.bin"} {
				if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", script}, 0); err == nil {
					t.Errorf("%q succeeded", script)
				}
			}
			harness.Equal(t, "a sub path", pod.Sh(t, "ls /v", harness.Mount(imageVolume(id, "weights"))), "one.bin\n")
			_, err := pod.TryCreate(t, harness.Image(name))
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), name+" is an OCI artifact") {
				t.Errorf("container of an artifact: %v", err)
			}
			harness.WantText(t, "JSON", runBerth(t, d, "image", "ls", "-o", "json"), `"artifactType": "application/vnd.example.model"`)
			d.Restart(t)
			harness.Equal(t, "after a restart", c.Exec(t, "cat", "/v/config.json"), "{}")
			runBerth(t, d, "image", "rm", "--force", name)
		})
	}
}
