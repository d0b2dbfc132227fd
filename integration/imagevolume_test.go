package integration

import (
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

	"berth/integration/fixture"
)

// volumeImage pushes an image of two layers without a program of its own: a model, and
// links that try to lead out of it.
func volumeImage(t *testing.T, tag string) (name, id string) {
	t.Helper()
	img, err := fixture.ImageOf(v1.Config{},
		packLayer(t, fixture.Tree{
			fixture.Dir("model", 0o755), fixture.File("model/weights", 0o644, "42 "+tag+"\n"),
			fixture.File("model/run", 0o755, "#!/bin/sh\necho ran\n"), fixture.File("replaced", 0o644, "old\n"),
		}, fixture.Gzip),
		packLayer(t, fixture.Tree{
			fixture.File("replaced", 0o644, "new\n"), fixture.Symlink("latest", "/model"), fixture.Symlink("up", "../../../../model"),
			fixture.Symlink("outside", "/proc/self/root/etc"), fixture.Symlink("loop", "loop"), fixture.CharDevice("null", 0o666, 1, 3),
		}, fixture.Gzip))
	must(t, err)
	return push(t, registry, "volume:"+tag, img)
}

// imageVolume mounts an image at /v as kubelet asks for it: by the ID that PullImage gave.
func imageVolume(id, subPath string) *runtimeapi.Mount {
	return &runtimeapi.Mount{ContainerPath: "/v", Readonly: true, ImageSubPath: subPath, Image: &runtimeapi.ImageSpec{Image: id}}
}

func TestImageVolume(t *testing.T) {
	name, id := volumeImage(t, "content")
	d := startDaemon(t)
	equal(t, "pulled ID", d.pull(t, name), id)
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t, mount(imageVolume(id, "")))
	equal(t, "content", c.exec(t, "sh", "-c", "cat /v/model/weights /v/replaced"), "42 content\nnew")
	equal(t, "a program of it", c.exec(t, "/v/model/run"), "ran")
	for _, script := range []string{"echo x >/v/model/weights", "touch /v/new", "mount -o remount,rw /v"} {
		if _, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", script}, 0); err == nil {
			t.Errorf("%q succeeded", script)
		}
	}
	reported := c.status(t)
	equal(t, "image of the mount in the status", reported.Mounts[0].Image.GetImage(), id)
	equal(t, "its ID in the status", reported.Mounts[0].Image.GetImageRef(), id)
	for _, m := range mountpoints(t, 1) {
		if contains(m, c.id) {
			t.Errorf("the host has a mount at %s", m)
		}
	}
	equal(t, "content in a container of another image mounted by name",
		pod.sh(t, "cat /v/replaced", mount(imageVolume(name, ""))), "new\n")
	options := imageVolume(id, "")
	options.MountOptions = []string{"noexec"}
	equal(t, "a program with noexec", pod.sh(t, "/v/model/run 2>/dev/null || echo refused", mount(options)), "refused\n")
}

// A sub path is resolved with the image as the root, links included.
func TestImageVolumeSubPath(t *testing.T) {
	_, id := volumeImage(t, "subpath")
	d := startDaemon(t)
	d.pull(t, registry.Host+"/volume:subpath")
	pod := d.runPod(t, hostNetwork)
	for _, c := range []struct{ path, file string }{
		{"model", "/v/weights"}, {"/model/", "/v/weights"}, {"model/weights", "/v"}, {"latest", "/v/weights"},
		{"up", "/v/weights"}, {"../../model", "/v/weights"}, {"latest/weights", "/v"},
	} {
		equal(t, "content of "+c.path, pod.sh(t, "cat "+c.file+"; test ! -e /v/replaced", mount(imageVolume(id, c.path))), "42 subpath\n")
	}
	for _, path := range []string{"missing", "model/missing", "replaced/below", "outside", "loop", "null", strings.Repeat("x", 256)} {
		_, err := pod.tryCreate(t, mount(imageVolume(id, path)))
		wantCode(t, err, codes.InvalidArgument, "/v", path)
		wantReason(t, err, "ImageVolumeMountFailed: ")
	}
	equal(t, "containers left by those that could not be created", len(get(d.cri.ListContainers(t.Context(), nil))(t)), 7)
}

// wantReason checks the beginning of an error's text, which is what kubelet looks at.
func wantReason(t *testing.T, err error, reason string) {
	t.Helper()
	var s interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &s) || !strings.HasPrefix(s.GRPCStatus().Message(), reason) {
		t.Errorf("the error does not begin with %q: %v", reason, err)
	}
}

func TestImageVolumeRefused(t *testing.T) {
	_, id := volumeImage(t, "refused")
	d := startDaemon(t)
	d.pull(t, registry.Host+"/volume:refused")
	pod := d.runPod(t, hostNetwork)
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
			_, err := pod.tryCreate(t, mount(m))
			wantCode(t, err, c.code)
			wantReason(t, err, "ImageVolumeMountFailed: ")
		})
	}
}

// The layers of a volume's image stay while the container exists, whatever becomes of the
// image and the daemon, and go with it.
func TestImageVolumeOutlivesImageAndDaemon(t *testing.T) {
	_, id := volumeImage(t, "held")
	d := startDaemon(t)
	d.pull(t, registry.Host+"/volume:held")
	pod := d.runPod(t, hostNetwork)
	running := pod.run(t, mount(imageVolume(id, "model")))
	created := pod.create(t, mount(imageVolume(id, "")))
	must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: id}))
	if got := d.imageStatus(t, id); got != nil {
		t.Errorf("the removed image is still there: %v", got)
	}
	equal(t, "content without the image", running.exec(t, "cat", "/v/weights"), "42 held")
	d.kill(t)
	d.start(t)
	equal(t, "content after a restart", running.exec(t, "cat", "/v/weights"), "42 held")
	equal(t, "image ID after a restart", running.status(t).Mounts[0].Image.GetImageRef(), id)
	created.start(t)
	equal(t, "content in the container created before", created.exec(t, "cat", "/v/replaced"), "new")
	_, err := pod.tryCreate(t, mount(imageVolume(id, "")))
	wantCode(t, err, codes.NotFound, id)
}

// The layers are other containers' as well: not even a privileged container, which may
// remount, can write to them.
func TestImageVolumeOfPrivilegedContainer(t *testing.T) {
	single, err := fixture.ImageOf(v1.Config{}, packLayer(t, fixture.Tree{fixture.File("file", 0o644, "content\n")}, fixture.Gzip))
	must(t, err)
	name, single1 := push(t, registry, "volume:single", single)
	_, several := volumeImage(t, "several")
	d := startDaemon(t)
	d.pull(t, name)
	d.pull(t, registry.Host+"/volume:several")
	pod := d.runPod(t, hostNetwork, privilegedPod)
	for _, id := range []string{single1, several} {
		equal(t, "what a privileged container can do", pod.sh(t,
			"for o in remount,rw remount,bind,rw; do mount -o $o /v 2>/dev/null; touch /v/new 2>/dev/null && echo written; done; true",
			security(privileged), mount(imageVolume(id, ""))), "")
	}
	equal(t, "content", pod.sh(t, "ls -A /v; cat /v/file", mount(imageVolume(single1, ""))), "file\ncontent\n")
}

// A pod with a user namespace sees the owners that the image says, not those on the host.
func TestImageVolumeInUserNamespace(t *testing.T) {
	owned := fixture.Tree{fixture.Dir("dir", 0o700).Owned(1001, 2001), fixture.File("dir/file", 0o600, "content\n").Owned(1001, 2001)}
	img, err := fixture.ImageOf(v1.Config{}, packLayer(t, owned, fixture.Gzip))
	must(t, err)
	name, id := push(t, registry, "volume:owned", img)
	_, several := volumeImage(t, "mapped")
	d := startDaemon(t)
	d.pull(t, name)
	d.pull(t, registry.Host+"/volume:mapped")
	const hostID = 30 * usernsLength
	pod := d.runPod(t, hostNetwork, userNamespace(hostID))
	equal(t, "owners and content", pod.sh(t, "stat -c %u:%g /v /v/file; cat /v/file; touch /v/new 2>/dev/null || echo read-only",
		inUserNamespace(hostID), mount(imageVolume(id, "dir"))), "1001:2001\n1001:2001\ncontent\nread-only\n")
	equal(t, "owner in an image of several layers", pod.sh(t, "stat -c %u:%g /v/replaced; cat /v/replaced",
		inUserNamespace(hostID), mount(imageVolume(several, ""))), "0:0\nnew\n")
}

// A launcher that is killed in the middle leaves no mount and no folder of a volume.
func TestImageVolumeStartFails(t *testing.T) {
	_, id := volumeImage(t, "startfails")
	d := startDaemon(t)
	d.pull(t, registry.Host+"/volume:startfails")
	pod := d.runPod(t, hostNetwork)
	c := pod.create(t, command("/does/not/exist"), mount(imageVolume(id, "model")))
	wantCode(t, d.cri.StartContainer(t.Context(), c.id), codes.InvalidArgument, "/does/not/exist")
	if _, err := os.Stat(fmt.Sprintf("%s/c/%s", d.state, c.id)); !os.IsNotExist(err) {
		t.Errorf("the shim directory is still there: %v", err)
	}
	equal(t, "another container runs", pod.sh(t, "cat /v/weights", mount(imageVolume(id, "model"))), "42 startfails\n")
}

// The mounts of an image are gone with the container's last process.
func TestImageVolumeGoesWithItsContainer(t *testing.T) {
	_, id := volumeImage(t, "gone")
	d := startDaemon(t)
	d.pull(t, registry.Host+"/volume:gone")
	c := d.runPod(t, hostNetwork).run(t, mount(imageVolume(id, "")))
	must(t, syscall.Kill(c.pid(t), syscall.SIGKILL))
	c.waitExited(t)
	must(t, d.cri.RemoveContainer(t.Context(), c.id))
	must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: id}))
	for _, pid := range processes() {
		for _, m := range readLines(fmt.Sprintf("/proc/%d/mountinfo", pid)) {
			if contains(m, c.id) {
				t.Errorf("process %d still has %s", pid, m)
			}
		}
	}
}
