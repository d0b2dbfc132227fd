package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/erofs"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

func TestPullByTagDigestAndBoth(t *testing.T) {
	img := harness.BuildImage(t, v1.Config{User: "web"}, fixture.Tree{fixture.File("forms", 0o644, "x")})
	name, id := harness.Push(t, harness.Registry, "forms:v1", img)
	digest := harness.DigestOf(t, img)
	for _, ref := range []string{name, harness.Repository(name) + "@" + digest, name + "@" + digest} {
		t.Run(strings.TrimPrefix(ref, harness.Registry.Host), func(t *testing.T) {
			d := harness.StartDaemon(t)
			harness.Equal(t, "image_ref", d.Pull(t, ref), id)
			for _, query := range []string{ref, id} {
				status := d.ImageStatus(t, query)
				if status == nil {
					t.Fatalf("ImageStatus(%s) returns no image", query)
				}
				harness.Equal(t, "ID", status.Id, id)
				harness.Equal(t, "username", status.Username, "web")
				if want := harness.Repository(name) + "@" + digest; !slices.Equal(status.RepoDigests, []string{want}) {
					t.Errorf("repo digests are %v, want %s", status.RepoDigests, want)
				}
				if status.Size == 0 {
					t.Error("size is 0")
				}
			}
			if ref == name {
				harness.Equal(t, "tags", fmt.Sprint(d.ImageStatus(t, id).RepoTags), fmt.Sprint([]string{name}))
			}
		})
	}
}

func TestPullDockerSchema2(t *testing.T) {
	img := harness.Get(fixture.Docker(harness.BuildImage(t, v1.Config{})))(t)
	name, id := harness.Push(t, harness.Registry, "schema2:latest", img)
	d := harness.StartDaemon(t)
	harness.Equal(t, "image_ref", d.Pull(t, name), id)
	harness.Equal(t, "output", d.RunPod(t, harness.HostNetwork).Sh(t, "echo hello", harness.Image(name)), "hello\n")
}

// The index first lists an image for another platform, whose layer does not exist.
func TestPullIndexByPlatform(t *testing.T) {
	img := harness.BuildImage(t, v1.Config{Env: []string{"PATH=/bin", "FROM=index"}})
	foreign := harness.Get(fixture.ImageOf(v1.Config{}, harness.PackLayer(t, fixture.Tree{fixture.File("foreign", 0o644, "x")}, fixture.Gzip)))(t)
	config := harness.Get(img.ConfigFile())(t)
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
		mutate.IndexAddendum{Add: foreign, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: config.Architecture}}},
	)
	name := harness.Get(harness.Registry.PushIndex("index:latest", index))(t)

	d := harness.StartDaemon(t)
	id := harness.Get(img.ConfigName())(t)
	harness.Equal(t, "image_ref", d.Pull(t, name), id.String())
	harness.Equal(t, "output", d.RunPod(t, harness.HostNetwork).Sh(t, "echo $FROM", harness.Image(name)), "index\n")
	if want := harness.Repository(name) + "@" + harness.DigestOf(t, index); !slices.Contains(d.ImageStatus(t, name).RepoDigests, want) {
		t.Errorf("repo digests %v lack the index's, %s", d.ImageStatus(t, name).RepoDigests, want)
	}
}

func TestPullLayersGzipZstdPlain(t *testing.T) {
	img, err := fixture.Image(v1.Config{},
		harness.PackLayer(t, fixture.Tree{fixture.File("gzip", 0o644, "one")}, fixture.Gzip),
		harness.PackLayer(t, fixture.Tree{fixture.File("zstd", 0o644, "two")}, fixture.Zstd),
		harness.PackLayer(t, fixture.Tree{fixture.File("plain", 0o644, "three")}, fixture.Plain))
	harness.Must(t, err)
	name, _ := harness.Push(t, harness.Registry, "compressions:latest", img)
	d := harness.StartDaemon(t)
	harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, "cat gzip zstd plain; echo", harness.Image(name)), "onetwothree\n")
}

// The content of a layer is checked inside a container.
func TestLayerContent(t *testing.T) {
	long := strings.Repeat("d/", 60) + strings.Repeat("n", 200)
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" // cap_net_bind_service=ep
	lower := fixture.Tree{
		fixture.File("gone", 0o644, "x"), fixture.Dir("gone-dir", 0o755), fixture.File("gone-dir/file", 0o644, "x"),
		fixture.Dir("opaque", 0o755), fixture.File("opaque/lower", 0o644, "x"),
		fixture.File("target", 0o640, "linked").Owned(7, 8), fixture.Dir("replaced", 0o755), fixture.File("replaced/x", 0o644, "x"),
		fixture.File("was-file", 0o644, "x"),
	}
	upper := fixture.Tree{
		fixture.Whiteout("", "gone"), fixture.Whiteout("", "gone-dir"),
		fixture.Opaque("opaque/"), fixture.File("opaque/upper", 0o644, "x"),
		fixture.Hardlink("link", "target"), fixture.File("same", 0o644, "s"), fixture.Hardlink("same-link", "same"),
		fixture.File("replaced", 0o644, "now a file"), fixture.Dir("was-file", 0o755), fixture.File("was-file/in", 0o644, "x"),
		fixture.File("missing/parent/file", 0o644, "x"), fixture.File("long/"+long, 0o644, "long"),
		fixture.File("setuid", 0o4755, "x"), fixture.Dir("sticky", 0o1777), fixture.File("owned", 0o600, "x").Owned(1001, 2001),
		fixture.CharDevice("null-device", 0o666, 1, 3), fixture.File("capable", 0o755, "x").WithXattr("security.capability", capability),
		fixture.Symlink("dangling", "/no/such/file"), fixture.Symlink("absolute", "/etc/passwd"),
	}
	name, _ := harness.Push(t, harness.Registry, "content:latest", harness.BuildImage(t, v1.Config{}, lower, upper))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	checks := []string{
		"[ ! -e /gone ]", "[ ! -e /gone-dir ]", "[ ! -e /opaque/lower ]", "[ -f /opaque/upper ]",
		"[ $(cat /link) = linked ]", `[ "$(stat -c %u:%g:%a /link)" = 7:8:640 ]`,
		"[ $(stat -c %i /same) = $(stat -c %i /same-link) ]", "[ $(stat -c %h /same) = 2 ]",
		"[ $(stat -c %i /link) = $(stat -c %i /target) ]",
		"[ -f /replaced ]", "[ -f /was-file/in ]",
		"[ -f /missing/parent/file ]", "[ $(stat -c %u:%a /missing/parent) = 0:755 ]",
		"[ $(cat /long/" + long + ") = long ]",
		"[ $(stat -c %a /setuid) = 4755 ]", "[ $(stat -c %a /sticky) = 1777 ]", "[ $(stat -c %u:%g:%a /owned) = 1001:2001:600 ]",
		`[ "$(stat -c %F:%t:%T /null-device)" = "character special file:1:3" ]`,
		"[ $(readlink /dangling) = /no/such/file ]", "[ $(head -c 4 /absolute) = root ]",
		"[ ! -e /.wh.gone ]", "[ ! -e /opaque/.wh..wh..opq ]",
		"[ -x /bin/ls ]", "[ $(stat -c %a /tmp) = 1777 ]",
	}
	var s strings.Builder
	for _, check := range checks {
		fmt.Fprintf(&s, "%s || { echo 'failed: %s'; bad=1; }\n", check, strings.ReplaceAll(check, "'", `'\''`))
	}
	c, status := pod.RunToEnd(t, harness.Image(name), harness.Script(s.String()+"exit $bad"))
	if status.ExitCode != 0 {
		t.Errorf("exit code %d:\n%s", status.ExitCode, c.Output(t))
	}
	fileCapability(t, pod.Run(t, harness.Image(name)), "/capable", capability)
}

// fileCapability reads the attribute through the container's root, because busybox has no getcap.
func fileCapability(t *testing.T, c *harness.Container, path, want string) {
	t.Helper()
	value := make([]byte, 64)
	n := harness.Get(machine.Lgetxattr(fmt.Sprintf("/proc/%d/root%s", c.Pid(t), path), "security.capability", value))(t)
	harness.Equal(t, "file capability", fmt.Sprintf("%x", value[:n]), fmt.Sprintf("%x", want))
}

// A sparse file keeps its content, and uses no more space than its data.
func TestLayerSparseFile(t *testing.T) {
	hole := strings.Repeat("\x00", 8<<20)
	name, _ := harness.Push(t, harness.Registry, "sparse:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("sparse", 0o644, "head"+hole+"tail")}))
	d := harness.StartDaemon(t)
	harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, "head -c 4 /sparse; tail -c 4 /sparse; stat -c ' %s' /sparse", harness.Image(name)),
		fmt.Sprintf("headtail %d\n", len(hole)+8))
}

func TestImageListStatusRemove(t *testing.T) {
	d := harness.StartDaemon(t)
	img := harness.BuildImage(t, v1.Config{User: "1001:2001"}, fixture.Tree{fixture.File("listed", 0o644, "x")})
	first, id := harness.Push(t, harness.Registry, "listed:one", img)
	second, _ := harness.Push(t, harness.Registry, "listed:two", img)
	d.Pull(t, first)
	d.Pull(t, second)
	d.Pull(t, harness.BaseImage)

	all := harness.Get(d.Images.ListImages(t.Context(), nil))(t)
	harness.Equal(t, "number of images", len(all), 2)
	filtered := harness.Get(d.Images.ListImages(t.Context(), &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: second}}))(t)
	harness.Equal(t, "number of images of that name", len(filtered), 1)
	harness.Equal(t, "its ID", filtered[0].Id, id)
	slices.Sort(filtered[0].RepoTags)
	harness.Equal(t, "its tags", fmt.Sprint(filtered[0].RepoTags), fmt.Sprint([]string{first, second}))
	harness.Equal(t, "its user", filtered[0].Uid.GetValue(), 1001)

	hex := strings.TrimPrefix(id, "sha256:")
	byDigest := "@" + harness.DigestOf(t, img)
	for _, query := range []string{id, hex, hex[:12], id[:len("sha256:")+12], first, harness.Repository(first) + byDigest, second + byDigest} {
		if status := d.ImageStatus(t, query); status == nil || status.Id != id {
			t.Errorf("ImageStatus(%q) is %v, want %s", query, status, id)
		}
		listed := harness.Get(d.Images.ListImages(t.Context(), &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: query}}))(t)
		if len(listed) != 1 || listed[0].Id != id {
			t.Errorf("ListImages(%q) is %v, want %s", query, listed, id)
		}
	}
	for _, query := range []string{harness.Registry.Host + "/no-such:tag", strings.Repeat("0", 64), "ffffffffffff"} {
		if status := d.ImageStatus(t, query); status != nil {
			t.Errorf("ImageStatus(%q) is %v, want none and no error", query, status)
		}
	}

	// Removing one tag removes all tags. A second removal is no error.
	for range 2 {
		harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: first}))
	}
	if status := d.ImageStatus(t, second); status != nil {
		t.Errorf("after the removal of %s its tags are %v", first, status.RepoTags)
	}
}

func TestImagesSurviveRestart(t *testing.T) {
	d := harness.StartDaemon(t)
	id := d.Pull(t, harness.BaseImage)
	d.Restart(t)
	if status := d.ImageStatus(t, harness.BaseImage); status == nil || status.Id != id {
		t.Fatalf("after a restart ImageStatus is %v, want %s", status, id)
	}
	harness.Equal(t, "output", d.RunPod(t, harness.HostNetwork).Sh(t, "echo still here"), "still here\n")
	d.Kill(t)
	d.Start(t)
	if status := d.ImageStatus(t, harness.BaseImage); status == nil || status.Id != id {
		t.Fatalf("after a kill ImageStatus is %v, want %s", status, id)
	}
}

func TestImageFsInfo(t *testing.T) {
	d := harness.StartDaemon(t)
	used := func() (bytes, inodes uint64) {
		info := harness.Get(d.Images.ImageFsInfo(t.Context()))(t)
		harness.Equal(t, "number of image filesystems", len(info.ImageFilesystems), 1)
		fs := info.ImageFilesystems[0]
		if fs.FsId.GetMountpoint() == "" || fs.Timestamp == 0 {
			t.Errorf("mount point or time is missing: %v", fs)
		}
		return fs.UsedBytes.GetValue(), fs.InodesUsed.GetValue()
	}
	const size = 3 << 20
	bytesBefore, inodesBefore := used()
	name, _ := harness.Push(t, harness.Registry, "sized:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("big", 0o644, strings.Repeat("b", size))}))
	d.Pull(t, name)
	bytesAfter, inodesAfter := used()
	if bytesAfter < bytesBefore+size {
		t.Errorf("used bytes went from %d to %d, the image has more than %d", bytesBefore, bytesAfter, size)
	}
	if inodesAfter <= inodesBefore {
		t.Errorf("used inodes went from %d to %d", inodesBefore, inodesAfter)
	}
	// kubelet's garbage collection counts the space that a removal has freed.
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	harness.Eventually(t, "the image's space is free", func() error { // the daemon deletes files in the background, and counts them until then
		if bytes, inodes := used(); bytes != bytesBefore || inodes != inodesBefore {
			return fmt.Errorf("%d bytes and %d inodes are used, before the pull %d and %d", bytes, inodes, bytesBefore, inodesBefore)
		}
		return nil
	})
}

func TestPinnedImages(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("image.pinned = [%q]", harness.BaseImage)))
	d.Pull(t, harness.BaseImage)
	if !d.ImageStatus(t, harness.BaseImage).Pinned {
		t.Error("the image is not reported as pinned")
	}
	other, _ := harness.Push(t, harness.Registry, "unpinned:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("unpinned", 0o644, "")}))
	d.Pull(t, other)
	if d.ImageStatus(t, other).Pinned {
		t.Error("another image is reported as pinned")
	}
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: harness.BaseImage})) // pinned is only a hint
	if d.ImageStatus(t, harness.BaseImage) != nil {
		t.Error("a pinned image cannot be removed")
	}
}

// Layers exist as long as a container needs them.
func TestRemoveImageUnderContainer(t *testing.T) {
	d := harness.StartDaemon(t)
	name, id := harness.Push(t, harness.Registry, "removed:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("kept", 0o644, "kept")}))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Image(name))
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	if status := d.ImageStatus(t, id); status != nil {
		t.Errorf("the image is still there: %v", status)
	}
	harness.Equal(t, "content", c.Exec(t, "cat", "/kept"), "kept")
	harness.Equal(t, "image_id", c.Status(t).ImageId, id)
	d.Restart(t)
	harness.Equal(t, "content after a restart", c.Exec(t, "cat", "/kept"), "kept")
	_, err := d.Cri.CreateContainer(t.Context(), pod.Id, pod.ContainerConfig(harness.Image(name)), pod.Config)
	harness.WantCode(t, err, codes.NotFound, name)
}

// Each field that identifies an image contains its ID (required since v1.36): PullImage,
// ImageStatus, ListImages, image_id in statuses and lists of containers, image volumes, and events.
// image_ref of a container is the registry's digest.
func TestImageIDIsTheSameEverywhere(t *testing.T) {
	d := harness.StartDaemon(t)
	stream := events(t, d)
	id := d.Pull(t, harness.BaseImage)
	harness.Equal(t, "ID of ImageStatus", d.ImageStatus(t, harness.BaseImage).Id, id)
	ref := d.ImageStatus(t, harness.BaseImage).RepoDigests[0]
	listed := harness.Get(d.Images.ListImages(t.Context(), nil))(t)
	harness.Equal(t, "number of images", len(listed), 1)
	harness.Equal(t, "listed ID", listed[0].Id, id)
	harness.Equal(t, "image of the listed spec", listed[0].Spec.Image, id)
	pod := d.RunPod(t, harness.HostNetwork)
	byName := pod.Run(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/volume", Readonly: true, Image: &runtimeapi.ImageSpec{Image: harness.BaseImage}}))
	byID := pod.Run(t, harness.Image(id))
	check := func(where string, status *runtimeapi.ContainerStatus) {
		harness.Equal(t, "image_id in "+where, status.ImageId, id)
		harness.Equal(t, "image_ref in "+where, status.ImageRef, ref)
	}
	for _, c := range []*harness.Container{byName, byID} {
		check("status", c.Status(t))
		check("verbose status", harness.Get(d.Cri.ContainerStatus(t.Context(), c.Id, true))(t).Status)
	}
	harness.Equal(t, "image_ref of the volume", byName.Status(t).Mounts[0].Image.ImageRef, id)
	for _, c := range harness.Get(d.Cri.ListContainers(t.Context(), nil))(t) {
		harness.Equal(t, "listed image_id", c.ImageId, id)
		harness.Equal(t, "listed image_ref", c.ImageRef, ref)
	}
	for _, status := range harness.Get(d.Cri.PodSandboxStatus(t.Context(), pod.Id, false))(t).ContainersStatuses {
		check("the pod's status", status)
	}
	for seen := 0; seen < 2; { // until events of both started containers have arrived
		event := harness.Get(stream.Recv())(t)
		for _, status := range event.ContainersStatuses {
			check("event "+event.ContainerEventType.String(), status)
		}
		if event.ContainerEventType == runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT && event.ContainerId != pod.Id {
			seen++
		}
	}
}

// A container's image_ref is repository@digest, with the repository in the container's config and
// the digest that the registry served. Scanners and policy engines identify images by it. It does
// not change when the image gets other names or is removed.
func TestContainerImageRefIsARepositoryDigest(t *testing.T) {
	d := harness.StartDaemon(t)
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("ref", 0o644, "x")})
	one, id := harness.Push(t, harness.Registry, "ref-a:one", img)
	two, _ := harness.Push(t, harness.Registry, "ref-b:two", img)
	d.Pull(t, one)
	pod := d.RunPod(t, harness.HostNetwork)
	wants := map[*harness.Container]string{}
	digested := func(name string) string { return harness.Repository(name) + "@" + harness.DigestOf(t, img) }
	run := func(written, want string) {
		c := pod.Run(t, harness.Image(id), func(config *runtimeapi.ContainerConfig) { config.Image.UserSpecifiedImage = written })
		wants[c] = want
	}
	check := func(when string) {
		t.Helper()
		for c, want := range wants {
			harness.Equal(t, "image_ref "+when, c.Status(t).ImageRef, want)
			harness.Equal(t, "image_id "+when, c.Status(t).ImageId, id)
		}
		for _, c := range harness.Get(d.Cri.ListContainers(t.Context(), nil))(t) {
			if c.ImageId != id || c.ImageRef == id {
				t.Errorf("listed %s: %s, %s", when, c.ImageId, c.ImageRef)
			}
		}
	}
	run(one, digested(one))
	d.Pull(t, two)
	run(two, digested(two))
	run(one, digested(one))
	run(digested(one), digested(one))
	run("", digested(two)) // the last one pulled
	check("while the image is there")
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: id}))
	check("after the image was removed")
	d.Restart(t)
	check("after a restart")
}

// Removing an image by one name removes all its names, also those in other repositories.
func TestRemoveImageWithManyNames(t *testing.T) {
	d := harness.StartDaemon(t)
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("many", 0o644, "x")})
	one, id := harness.Push(t, harness.Registry, "many-a:one", img)
	two, _ := harness.Push(t, harness.Registry, "many-b:two", img)
	d.Pull(t, one)
	d.Pull(t, two)
	harness.Equal(t, "number of tags", len(d.ImageStatus(t, id).RepoTags), 2)
	harness.Equal(t, "number of digests", len(d.ImageStatus(t, id).RepoDigests), 2)
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: harness.Repository(one) + "@" + harness.DigestOf(t, img)}))
	for _, query := range []string{one, two, id} {
		if status := d.ImageStatus(t, query); status != nil {
			t.Errorf("ImageStatus(%q) is still %v", query, status)
		}
		harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: query}))
	}
}

// The API requires that a pull for an unknown runtime handler is refused.
func TestPullForRuntimeHandler(t *testing.T) {
	d := harness.StartDaemon(t)
	pull := func(handler string) error {
		_, err := d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: harness.BaseImage, RuntimeHandler: handler}, nil, nil)
		return err
	}
	harness.WantCode(t, pull("unknown"), codes.NotFound, "unknown")
	if d.ImageStatus(t, harness.BaseImage) != nil {
		t.Error("the image was pulled")
	}
	harness.Must(t, pull("berth"))
	harness.Must(t, pull(""))
}

// pauseImage pushes an image that can replace pause.
func pauseImage(t *testing.T) string {
	t.Helper()
	name, _ := harness.Push(t, harness.Registry, "pause:override", harness.BuildImage(t, v1.Config{Entrypoint: []string{"sleep", "99999"}}))
	return name
}

// layeredImage pushes an image. Its second layer changes and deletes files of the first one.
func layeredImage(t *testing.T, tag string) (name, id string) {
	t.Helper()
	img := harness.BuildImage(t, v1.Config{},
		fixture.Tree{fixture.Dir("d", 0o1777), fixture.File("d/old", 0o644, "old\n"), fixture.File("d/kept", 0o644, "kept "+tag+"\n"), fixture.File("gone", 0o644, "")},
		fixture.Tree{fixture.File("d/new", 0o600, "new\n"), fixture.File("d/.wh.old", 0o644, ""), fixture.File(".wh.gone", 0o644, "")})
	return harness.Push(t, harness.Registry, "layered:"+tag, img)
}

const showLayered = "cat /d/kept /d/new; ls /d; stat -c %a /d; test ! -e /gone"

// needEROFS skips the test on a machine without layers as EROFS images.
func needEROFS(t *testing.T) {
	t.Helper()
	if err := erofs.Probe("/var/tmp"); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
}

// Containers see the same content with each layer driver. Images of another driver remain usable.
func TestLayerDrivers(t *testing.T) {
	needEROFS(t)
	name, id := layeredImage(t, "drivers")
	const want = "kept drivers\nnew\nkept\nnew\n1777\n"
	d := harness.StartDaemon(t, harness.WithLayerDriver("erofs"))
	harness.Equal(t, "driver", harness.Get(d.Cri.Status(t.Context(), true))(t).Info["layerDriver"], `"erofs"`)
	harness.Equal(t, "pulled ID", d.Pull(t, name), id)
	if entries, err := os.ReadDir(filepath.Join(d.Root, "images/layers")); err != nil || len(entries) > 0 {
		t.Errorf("%d layers are directories, %v", len(entries), err)
	}
	pod := d.RunPod(t, harness.HostNetwork)
	harness.Equal(t, "EROFS", pod.Sh(t, showLayered, harness.Image(name)), want)
	running := pod.Run(t, harness.Image(name))
	harness.Equal(t, "written", running.Exec(t, "sh", "-c", "echo more >>/d/kept; rm /d/new; mv /d /e; cat /e/kept; ls /e"), "kept drivers\nmore\nkept")
	harness.Equal(t, "the image, unchanged", pod.Sh(t, showLayered, harness.Image(name)), want)
	harness.Equal(t, "a volume", pod.Sh(t, "cat /v/d/kept; ls /v/d", harness.Mount(imageVolume(id, ""))), "kept drivers\nkept\nnew\n")
	harness.Equal(t, "a sub path", pod.Sh(t, "cat /v/kept", harness.Mount(imageVolume(id, "d"))), "kept drivers\n")
	const hostID = 7 * usernsLength
	inside := d.RunPod(t, userNamespace(hostID))
	harness.Equal(t, "in a user namespace", inside.Sh(t, showLayered+"; stat -c %u:%g /d", inUserNamespace(hostID), harness.Image(name)), want+"0:0\n")

	d.SetConfig(t, `image.layer_driver = "erofs"`, `image.layer_driver = "directory"`)
	d.Restart(t)
	harness.Equal(t, "driver", harness.Get(d.Cri.Status(t.Context(), true))(t).Info["layerDriver"], `"directory"`)
	harness.Equal(t, "the container from before the restart", running.Exec(t, "cat", "/e/kept"), "kept drivers\nmore")
	harness.Equal(t, "pulled again", d.Pull(t, name), id)
	harness.Equal(t, "EROFS under directory", pod.Sh(t, showLayered, harness.Image(name)), want)
	other, _ := layeredImage(t, "other")
	d.Pull(t, other)
	harness.Equal(t, "a directory", pod.Sh(t, showLayered, harness.Image(other)), strings.ReplaceAll(want, "drivers", "other"))

	d.SetConfig(t, `image.layer_driver = "directory"`, `image.layer_driver = "auto"`)
	d.Restart(t)
	harness.Equal(t, "a directory under auto", pod.Sh(t, showLayered, harness.Image(other)), strings.ReplaceAll(want, "drivers", "other"))

	// Simulate a reboot into a kernel that cannot mount EROFS layers: the daemon's probe files are
	// on a tmpfs.
	pod.Remove(t)
	inside.Remove(t)
	probed := filepath.Join(d.Root, "images/tmp")
	harness.Must(t, unix.Mount("berth-test", probed, "tmpfs", 0, "mode=0700"))
	d.Restart(t)
	harness.Must(t, unix.Unmount(probed, 0))
	harness.Equal(t, "driver", harness.Get(d.Cri.Status(t.Context(), true))(t).Info["layerDriver"], `"directory"`)
	if status := d.ImageStatus(t, name); status != nil {
		t.Errorf("an image that cannot be mounted is listed: %v", status)
	}
	if d.ImageStatus(t, other) == nil {
		t.Error("an image of directories is gone")
	}
	if _, err := os.Stat(filepath.Join(d.Root, "images/erofs")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the EROFS layers are still there: %v", err)
	}
	harness.Equal(t, "pulled again", d.Pull(t, name), id)
	pod = d.RunPod(t, harness.HostNetwork)
	harness.Equal(t, "a directory", pod.Sh(t, showLayered, harness.Image(name)), want)
	d.Restart(t)
	harness.Equal(t, "driver", harness.Get(d.Cri.Status(t.Context(), true))(t).Info["layerDriver"], `"erofs"`)
	harness.Equal(t, "a directory under auto", pod.Sh(t, showLayered, harness.Image(name)), want)
}
