package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
)

// newRegistry starts a registry for one test.
func newRegistry(t *testing.T) *fixture.Registry {
	t.Helper()
	r, err := fixture.NewRegistry()
	must(t, err)
	t.Cleanup(func() { must(t, r.Close()) })
	return r
}

// push builds an image, pushes it and returns its name and its ID.
func push(t *testing.T, r *fixture.Registry, repoTag string, img v1.Image) (name, id string) {
	t.Helper()
	name, err := r.Push(repoTag, img)
	must(t, err)
	config, err := img.ConfigName()
	must(t, err)
	return name, config.String()
}

// buildImage returns the base image with trees on top, each gzipped.
func buildImage(t *testing.T, config v1.Config, trees ...fixture.Tree) v1.Image {
	t.Helper()
	layers := make([]v1.Layer, 0, len(trees))
	for _, tree := range trees {
		layers = append(layers, packLayer(t, tree, fixture.Gzip))
	}
	img, err := fixture.Image(config, layers...)
	must(t, err)
	return img
}

func packLayer(t *testing.T, tree fixture.Tree, c fixture.Compression) v1.Layer {
	t.Helper()
	l, err := tree.Layer(c)
	must(t, err)
	return l
}

func digestOf(t *testing.T, d interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	h, err := d.Digest()
	must(t, err)
	return h.String()
}

// repository strips the tag of a name.
func repository(name string) string { return name[:strings.LastIndexByte(name, ':')] }

func TestPullByTagDigestAndBoth(t *testing.T) {
	img := buildImage(t, v1.Config{User: "web"}, fixture.Tree{fixture.File("forms", 0o644, "x")})
	name, id := push(t, registry, "forms:v1", img)
	digest := digestOf(t, img)
	for _, ref := range []string{name, repository(name) + "@" + digest, name + "@" + digest} {
		t.Run(strings.TrimPrefix(ref, registry.Host), func(t *testing.T) {
			d := startDaemon(t)
			equal(t, "image_ref", d.pull(t, ref), id)
			for _, query := range []string{ref, id} {
				status := d.imageStatus(t, query)
				if status == nil {
					t.Fatalf("ImageStatus(%s) knows no image", query)
				}
				equal(t, "ID", status.Id, id)
				equal(t, "username", status.Username, "web")
				if want := repository(name) + "@" + digest; !slices.Equal(status.RepoDigests, []string{want}) {
					t.Errorf("repo digests are %v, want %s", status.RepoDigests, want)
				}
				if status.Size == 0 {
					t.Error("size is 0")
				}
			}
			if ref == name {
				equal(t, "tags", fmt.Sprint(d.imageStatus(t, id).RepoTags), fmt.Sprint([]string{name}))
			}
		})
	}
}

func TestPullDockerSchema2(t *testing.T) {
	img, err := fixture.Docker(buildImage(t, v1.Config{}))
	must(t, err)
	name, id := push(t, registry, "schema2:latest", img)
	d := startDaemon(t)
	equal(t, "image_ref", d.pull(t, name), id)
	equal(t, "output", d.runPod(t, hostNetwork).sh(t, "echo hello", image(name)), "hello\n")
}

// The index names an image for another platform first, whose layer does not exist.
func TestPullIndexByPlatform(t *testing.T) {
	img := buildImage(t, v1.Config{Env: []string{"PATH=/bin", "FROM=index"}})
	foreign, err := fixture.ImageOf(v1.Config{}, packLayer(t, fixture.Tree{fixture.File("foreign", 0o644, "x")}, fixture.Gzip))
	must(t, err)
	config, err := img.ConfigFile()
	must(t, err)
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
		mutate.IndexAddendum{Add: foreign, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: config.Architecture}}},
	)
	name, err := registry.PushIndex("index:latest", index)
	must(t, err)

	d := startDaemon(t)
	id, err := img.ConfigName()
	must(t, err)
	equal(t, "image_ref", d.pull(t, name), id.String())
	equal(t, "output", d.runPod(t, hostNetwork).sh(t, "echo $FROM", image(name)), "index\n")
	if want := repository(name) + "@" + digestOf(t, index); !slices.Contains(d.imageStatus(t, name).RepoDigests, want) {
		t.Errorf("repo digests %v lack the index's, %s", d.imageStatus(t, name).RepoDigests, want)
	}
}

func TestPullLayersGzipZstdPlain(t *testing.T) {
	img, err := fixture.Image(v1.Config{},
		packLayer(t, fixture.Tree{fixture.File("gzip", 0o644, "one")}, fixture.Gzip),
		packLayer(t, fixture.Tree{fixture.File("zstd", 0o644, "two")}, fixture.Zstd),
		packLayer(t, fixture.Tree{fixture.File("plain", 0o644, "three")}, fixture.Plain))
	must(t, err)
	name, _ := push(t, registry, "compressions:latest", img)
	d := startDaemon(t)
	equal(t, "content", d.runPod(t, hostNetwork).sh(t, "cat gzip zstd plain; echo", image(name)), "onetwothree\n")
}

// What a layer may hold, checked from inside a container.
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
	name, _ := push(t, registry, "content:latest", buildImage(t, v1.Config{}, lower, upper))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
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
		fmt.Fprintf(&s, "%s || { echo 'not true: %s'; bad=1; }\n", check, strings.ReplaceAll(check, "'", `'\''`))
	}
	c, status := pod.runToEnd(t, image(name), script(s.String()+"exit $bad"))
	if status.ExitCode != 0 {
		t.Errorf("exit code %d:\n%s", status.ExitCode, c.output(t))
	}
	fileCapability(t, pod.run(t, image(name)), "/capable", capability)
}

// fileCapability reads the attribute through the container's root, since busybox has no getcap.
func fileCapability(t *testing.T, c *container, path, want string) {
	t.Helper()
	value := make([]byte, 64)
	n, err := lgetxattr(fmt.Sprintf("/proc/%d/root%s", c.pid(t), path), "security.capability", value)
	must(t, err)
	equal(t, "file capability", fmt.Sprintf("%x", value[:n]), fmt.Sprintf("%x", want))
}

// A file with holes comes back with its content, and takes no more room than its data.
func TestLayerSparseFile(t *testing.T) {
	hole := strings.Repeat("\x00", 8<<20)
	name, _ := push(t, registry, "sparse:latest", buildImage(t, v1.Config{}, fixture.Tree{fixture.File("sparse", 0o644, "head"+hole+"tail")}))
	d := startDaemon(t)
	equal(t, "content", d.runPod(t, hostNetwork).sh(t, "head -c 4 /sparse; tail -c 4 /sparse; stat -c ' %s' /sparse", image(name)),
		fmt.Sprintf("headtail %d\n", len(hole)+8))
}

func TestImageListStatusRemove(t *testing.T) {
	d := startDaemon(t)
	img := buildImage(t, v1.Config{User: "1001:2001"}, fixture.Tree{fixture.File("listed", 0o644, "x")})
	first, id := push(t, registry, "listed:one", img)
	second, _ := push(t, registry, "listed:two", img)
	d.pull(t, first)
	d.pull(t, second)
	d.pull(t, baseImage)

	all := get(d.images.ListImages(t.Context(), nil))(t)
	equal(t, "number of images", len(all), 2)
	filtered := get(d.images.ListImages(t.Context(), &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: second}}))(t)
	equal(t, "number of images of that name", len(filtered), 1)
	equal(t, "its ID", filtered[0].Id, id)
	slices.Sort(filtered[0].RepoTags)
	equal(t, "its tags", fmt.Sprint(filtered[0].RepoTags), fmt.Sprint([]string{first, second}))
	equal(t, "its user", filtered[0].Uid.GetValue(), 1001)

	hex := strings.TrimPrefix(id, "sha256:")
	byDigest := "@" + digestOf(t, img)
	for _, query := range []string{id, hex, hex[:12], id[:len("sha256:")+12], first, repository(first) + byDigest, second + byDigest} {
		if status := d.imageStatus(t, query); status == nil || status.Id != id {
			t.Errorf("ImageStatus(%q) is %v, want %s", query, status, id)
		}
		listed := get(d.images.ListImages(t.Context(), &runtimeapi.ImageFilter{Image: &runtimeapi.ImageSpec{Image: query}}))(t)
		if len(listed) != 1 || listed[0].Id != id {
			t.Errorf("ListImages(%q) is %v, want %s", query, listed, id)
		}
	}
	for _, query := range []string{registry.Host + "/no-such:tag", strings.Repeat("0", 64), "ffffffffffff"} {
		if status := d.imageStatus(t, query); status != nil {
			t.Errorf("ImageStatus(%q) is %v, want none and no error", query, status)
		}
	}

	// Removing one tag removes them all; removing twice is no error.
	for range 2 {
		must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: first}))
	}
	if status := d.imageStatus(t, second); status != nil {
		t.Errorf("after removal of %s there is still %v", first, status.RepoTags)
	}
}

func TestImagesSurviveRestart(t *testing.T) {
	d := startDaemon(t)
	id := d.pull(t, baseImage)
	d.restart(t)
	if status := d.imageStatus(t, baseImage); status == nil || status.Id != id {
		t.Fatalf("after a restart ImageStatus is %v, want %s", status, id)
	}
	equal(t, "output", d.runPod(t, hostNetwork).sh(t, "echo still here"), "still here\n")
	d.kill(t)
	d.start(t)
	if status := d.imageStatus(t, baseImage); status == nil || status.Id != id {
		t.Fatalf("after a kill ImageStatus is %v, want %s", status, id)
	}
}

func TestImageFsInfo(t *testing.T) {
	d := startDaemon(t)
	used := func() (bytes, inodes uint64) {
		info := get(d.images.ImageFsInfo(t.Context()))(t)
		equal(t, "number of image filesystems", len(info.ImageFilesystems), 1)
		fs := info.ImageFilesystems[0]
		if fs.FsId.GetMountpoint() == "" || fs.Timestamp == 0 {
			t.Errorf("mount point or time is missing: %v", fs)
		}
		return fs.UsedBytes.GetValue(), fs.InodesUsed.GetValue()
	}
	const size = 3 << 20
	bytesBefore, inodesBefore := used()
	name, _ := push(t, registry, "sized:latest", buildImage(t, v1.Config{}, fixture.Tree{fixture.File("big", 0o644, strings.Repeat("b", size))}))
	d.pull(t, name)
	bytesAfter, inodesAfter := used()
	if bytesAfter < bytesBefore+size {
		t.Errorf("used bytes went from %d to %d, the image alone has more than %d", bytesBefore, bytesAfter, size)
	}
	if inodesAfter <= inodesBefore {
		t.Errorf("used inodes went from %d to %d", inodesBefore, inodesAfter)
	}
	// kubelet's garbage collection counts what a removal has freed.
	must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	eventually(t, "what the image took is free", func() error { // files are deleted in the background, and count until then
		if bytes, inodes := used(); bytes != bytesBefore || inodes != inodesBefore {
			return fmt.Errorf("used are %d bytes in %d inodes, before the pull %d in %d", bytes, inodes, bytesBefore, inodesBefore)
		}
		return nil
	})
}

func TestPinnedImages(t *testing.T) {
	d := startDaemon(t, withConfig(fmt.Sprintf("pinned_images = [%q]", baseImage)))
	d.pull(t, baseImage)
	if !d.imageStatus(t, baseImage).Pinned {
		t.Error("the image is not reported as pinned")
	}
	other, _ := push(t, registry, "unpinned:latest", buildImage(t, v1.Config{}, fixture.Tree{fixture.File("unpinned", 0o644, "")}))
	d.pull(t, other)
	if d.imageStatus(t, other).Pinned {
		t.Error("another image is reported as pinned")
	}
	must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: baseImage})) // pinned is advice
	if d.imageStatus(t, baseImage) != nil {
		t.Error("a pinned image cannot be removed")
	}
}

// Layers stay as long as a container needs them, and go with it.
func TestRemoveImageUnderContainer(t *testing.T) {
	d := startDaemon(t)
	name, id := push(t, registry, "removed:latest", buildImage(t, v1.Config{}, fixture.Tree{fixture.File("kept", 0o644, "kept")}))
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t, image(name))
	must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	if status := d.imageStatus(t, id); status != nil {
		t.Errorf("the image is still there: %v", status)
	}
	equal(t, "content", c.exec(t, "cat", "/kept"), "kept")
	equal(t, "image_id", c.status(t).ImageId, id)
	d.restart(t)
	equal(t, "content after a restart", c.exec(t, "cat", "/kept"), "kept")
	_, err := d.cri.CreateContainer(t.Context(), pod.id, pod.containerConfig(image(name)), pod.config)
	wantCode(t, err, codes.NotFound, name)
}

// Whatever names an image does so by the same value (strict since v1.36): PullImage, ImageStatus, ListImages, the
// status and the list of containers, image volumes, and events.
func TestImageIDIsTheSameEverywhere(t *testing.T) {
	d := startDaemon(t)
	stream := events(t, d)
	id := d.pull(t, baseImage)
	equal(t, "ID of ImageStatus", d.imageStatus(t, baseImage).Id, id)
	listed := get(d.images.ListImages(t.Context(), nil))(t)
	equal(t, "number of images", len(listed), 1)
	equal(t, "listed ID", listed[0].Id, id)
	equal(t, "image of the listed spec", listed[0].Spec.Image, id)
	pod := d.runPod(t, hostNetwork)
	byName := pod.run(t, mount(&runtimeapi.Mount{ContainerPath: "/volume", Readonly: true, Image: &runtimeapi.ImageSpec{Image: baseImage}}))
	byID := pod.run(t, image(id))
	check := func(where string, status *runtimeapi.ContainerStatus) {
		equal(t, "image_id in "+where, status.ImageId, id)
		equal(t, "image_ref in "+where, status.ImageRef, id)
	}
	for _, c := range []*container{byName, byID} {
		check("status", c.status(t))
		check("verbose status", get(d.cri.ContainerStatus(t.Context(), c.id, true))(t).Status)
	}
	equal(t, "image_ref of the volume", byName.status(t).Mounts[0].Image.ImageRef, id)
	for _, c := range get(d.cri.ListContainers(t.Context(), nil))(t) {
		equal(t, "listed image_id", c.ImageId, id)
		equal(t, "listed image_ref", c.ImageRef, id)
	}
	for _, status := range get(d.cri.PodSandboxStatus(t.Context(), pod.id, false))(t).ContainersStatuses {
		check("the pod's status", status)
	}
	for told := 0; told < 2; { // until both containers were seen started
		event := get(stream.Recv())(t)
		for _, status := range event.ContainersStatuses {
			check("event "+event.ContainerEventType.String(), status)
		}
		if event.ContainerEventType == runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT && event.ContainerId != pod.id {
			told++
		}
	}
}

// Removing an image by one name removes all its names, also those in other repositories.
func TestRemoveImageOfManyNames(t *testing.T) {
	d := startDaemon(t)
	img := buildImage(t, v1.Config{}, fixture.Tree{fixture.File("many", 0o644, "x")})
	one, id := push(t, registry, "many-a:one", img)
	two, _ := push(t, registry, "many-b:two", img)
	d.pull(t, one)
	d.pull(t, two)
	equal(t, "number of tags", len(d.imageStatus(t, id).RepoTags), 2)
	equal(t, "number of digests", len(d.imageStatus(t, id).RepoDigests), 2)
	must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: repository(one) + "@" + digestOf(t, img)}))
	for _, query := range []string{one, two, id} {
		if status := d.imageStatus(t, query); status != nil {
			t.Errorf("ImageStatus(%q) is still %v", query, status)
		}
		must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: query}))
	}
}

// The API wants an image for an unknown runtime handler refused.
func TestPullForRuntimeHandler(t *testing.T) {
	d := startDaemon(t)
	pull := func(handler string) error {
		_, err := d.images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: baseImage, RuntimeHandler: handler}, nil, nil)
		return err
	}
	wantCode(t, pull("unknown"), codes.NotFound, "unknown")
	if d.imageStatus(t, baseImage) != nil {
		t.Error("the image was pulled nevertheless")
	}
	must(t, pull("berth"))
	must(t, pull(""))
}

// pauseImage pushes an image that can stand in for pause.
func pauseImage(t *testing.T) string {
	t.Helper()
	name, _ := push(t, registry, "pause:override", buildImage(t, v1.Config{Entrypoint: []string{"sleep", "99999"}}))
	return name
}
