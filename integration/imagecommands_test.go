package integration

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// dockerArchive writes the image as docker save does, and returns the file.
func dockerArchive(t *testing.T, tag string, img v1.Image) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	harness.Must(t, tarball.WriteToFile(path, harness.Get(name.NewTag(tag))(t), img))
	return path
}

// Images from archives run without a registry. They come from files, directories and pipes.
func TestImageLoad(t *testing.T) {
	d := harness.StartDaemon(t)
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("from", 0o644, "archive\n")})
	id := harness.Get(img.ConfigName())(t).String()
	docker := dockerArchive(t, "example.com/docker:v1", img)
	harness.Equal(t, "output of load", runBerth(t, d, "image", "load", docker), id+" example.com/docker:v1\n")
	harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, "cat from", harness.Image("example.com/docker:v1")), "archive\n")

	other := harness.BuildImage(t, v1.Config{User: "web"}, fixture.Tree{fixture.File("from", 0o644, "layout\n")})
	dir := t.TempDir()
	path := harness.Get(layout.Write(dir, empty.Index))(t)
	harness.Must(t, path.AppendImage(other, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "example.com/layout:v1"})))
	harness.Must(t, path.AppendImage(harness.Get(mutate.AppendLayers(empty.Image,
		static.NewLayer([]byte("{}"), "application/vnd.dev.cosign.simplesigning.v1+json")))(t)))
	harness.WantText(t, "output of load", runBerth(t, d, "image", "load", "--pin", dir), "example.com/layout:v1", "skipped sha256:", "simplesigning")
	status := d.ImageStatus(t, "example.com/layout:v1")
	if !status.Pinned || len(status.RepoDigests) != 1 {
		t.Errorf("image from a layout: %+v", status)
	}
	harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, "cat from", harness.Image("example.com/layout:v1")), "layout\n")

	cmd := operatorCommand(d, "image", "load", "--name", "example.com/pipe:v1")
	cmd.Stdin = harness.Get(os.Open(docker))(t)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "example.com/pipe:v1") {
		t.Errorf("load from a pipe: %v\n%s", err, out)
	}
	runBerth(t, d, "image", "tag", "example.com/layout:v1", "example.com/again:v1")
	gone := runBerth(t, d, "image", "rm", "--force", status.RepoDigests[0])
	harness.WantText(t, "output of rm with a digest", gone, status.Id, "untagged", "example.com/again:v1", "example.com/layout:v1")
	if out, err := tryBerth(d, "image", "load", "/etc/passwd"); err == nil || !strings.Contains(out, "load /etc/passwd: invalid request: ") {
		t.Errorf("load of a text: %v\n%s", err, out)
	}
}

func TestImageCommands(t *testing.T) {
	d := harness.StartDaemon(t)
	pushed, id := harness.Push(t, harness.Registry, "commands:v1", harness.BuildImage(t, v1.Config{Env: []string{"PATH=/bin", "A=b"}}))
	harness.WantText(t, "pull", runBerth(t, d, "image", "pull", pushed), id)
	runBerth(t, d, "image", "tag", pushed, "example.com/second:v2")
	harness.WantText(t, "list", runBerth(t, d, "image", "ls"), "example.com/second:v2", pushed)
	runBerth(t, d, "image", "history", id)
	harness.WantText(t, "disk usage", runBerth(t, d, "image", "du"), "UNIQUE", "total")
	runBerth(t, d, "image", "rm", pushed)
	if list := runBerth(t, d, "image", "ls"); strings.Contains(list, pushed) || !strings.Contains(list, "example.com/second:v2") {
		t.Errorf("after the removal of one of two names:\n%s", list)
	}
	d.RunPod(t, harness.HostNetwork).Run(t, harness.Image("example.com/second:v2"))
	runBerth(t, d, "image", "tag", "example.com/second:v2", "example.com/third:v3")
	refused := func(ref, want string) {
		if out, err := tryBerth(d, "rmi", ref); err == nil || !strings.Contains(out, want) || d.ImageStatus(t, id) == nil {
			t.Errorf("rmi %s: %v: %s", ref, err, out)
		}
	}
	refused(id, "several names")
	runBerth(t, d, "rmi", "example.com/third:v3") // one of two names
	refused(id[7:19], "in use by container")
	refused("example.com/second:v2", "in use by container")
	runBerth(t, d, "image", "prune", "--all")
	if d.ImageStatus(t, id) == nil {
		t.Error("prune has removed the image of a container")
	}
	runBerth(t, d, "rmi", "--force", id)
	if d.ImageStatus(t, id) != nil {
		t.Error("rmi --force has kept an image")
	}
	unused := harness.BuildImage(t, v1.Config{User: "web"})
	runBerth(t, d, "image", "load", dockerArchive(t, "example.com/unused:v1", unused))
	runBerth(t, d, "image", "prune")
	if d.ImageStatus(t, "example.com/unused:v1") == nil {
		t.Error("prune without --all has removed an image with a name")
	}
	runBerth(t, d, "image", "prune", "--all")
	if d.ImageStatus(t, "example.com/unused:v1") != nil {
		t.Error("prune --all has kept an unused image")
	}
}

// A daemon that is killed during a load leaves nothing of it.
func TestKillDuringImageLoad(t *testing.T) {
	d := harness.StartDaemon(t)
	path := dockerArchive(t, "example.com/killed:v1", harness.BuildImage(t, v1.Config{}))
	data := harness.Get(os.ReadFile(path))(t)
	read, write, err := os.Pipe()
	harness.Must(t, err)
	cmd := operatorCommand(d, "image", "load")
	cmd.Stdin = read
	harness.Must(t, cmd.Start())
	harness.Must(t, read.Close())
	harness.Get(write.Write(data[:len(data)/2]))(t)
	harness.EventuallyTrue(t, "the load is visible", func() bool {
		reply, err := d.Cri.Status(t.Context(), true)
		return err == nil && strings.Contains(reply.Info["pulls"], `"archive"`)
	})
	d.Kill(t)
	harness.Must(t, write.Close())
	if err := cmd.Wait(); err == nil {
		t.Error("the load succeeded")
	}
	d.Start(t)
	harness.EventuallyGot(t, "no unfinished files", func() (bool, any) {
		names := machine.ReadDir(d.Root + "/images/tmp")
		return len(names) == 0, names
	})
	harness.Equal(t, "images", fmt.Sprint(len(harness.Get(d.Images.ListImages(t.Context(), nil))(t))), "0")
	runBerth(t, d, "image", "load", path)
}

// Archives in a directory become images at start and later.
func TestImagePreload(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "images.d")
	harness.Must(t, os.Mkdir(dir, 0o755))
	put := func(tag string, img v1.Image) {
		from := harness.Get(os.Open(dockerArchive(t, tag, img)))(t)
		defer from.Close()
		to := harness.Get(os.Create(filepath.Join(dir, filepath.Base(tag))))(t)
		harness.Get(io.Copy(to, from))(t)
		harness.Must(t, to.Close())
	}
	put("example.com/first", harness.BuildImage(t, v1.Config{}))
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("image.preload_dirs = [%q]", dir)))
	present := func(ref string) func() bool {
		return func() bool { img := d.ImageStatus(t, ref); return img != nil && img.Pinned }
	}
	harness.EventuallyTrue(t, "the first image", present("example.com/first"))
	put("example.com/second", harness.BuildImage(t, v1.Config{User: "web"}))
	harness.EventuallyTrue(t, "the second image", present("example.com/second"))
	harness.Equal(t, "output", d.RunPod(t, harness.HostNetwork).Sh(t, "echo ran", harness.Image("example.com/second")), "ran\n")
}

// A pulled image is saved, removed and loaded again under the same ID, with each layer driver.
// Other tools read the archives.
func TestImageSave(t *testing.T) {
	for _, driver := range []string{"auto", "directory"} {
		t.Run(driver, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.WithLayerDriver(driver))
			pushed, id := layeredImage(t, "saved-"+driver)
			d.Pull(t, pushed)
			const want = "kept saved-%s\nnew\nkept\nnew\n1777\n"
			dir := t.TempDir()
			for _, format := range []string{"oci", "docker"} {
				file := filepath.Join(dir, format+".tar")
				runBerth(t, d, "image", "save", "--format", format, "-o", file, pushed)
				saved := harness.Get(tarball.ImageFromPath(file, new(harness.Get(name.NewTag(pushed))(t))))(t)
				harness.Must(t, validate.Image(saved))
				harness.Equal(t, "ID in the archive", harness.Get(saved.ConfigName())(t).String(), id)
				runBerth(t, d, "image", "rm", pushed)
				harness.Equal(t, "output of load", runBerth(t, d, "image", "load", file), id+" "+pushed+"\n")
				pod := d.RunPod(t, harness.HostNetwork)
				harness.Equal(t, "content", pod.Sh(t, showLayered, harness.Image(pushed)), fmt.Sprintf(want, driver))
				pod.Remove(t)
			}
			cmd := operatorCommand(d, "image", "save", id)
			out := harness.Get(cmd.Output())(t) // to standard output
			if entries := strings.Count(string(out), "ustar"); entries < 5 {
				t.Errorf("%d bytes on standard output", len(out))
			}
			file := filepath.Join(dir, "missing.tar")
			if out, err := tryBerth(d, "image", "save", "-o", file, "example.com/missing:v1"); err == nil ||
				!strings.Contains(out, "not found") {
				t.Errorf("save of a missing image: %v\n%s", err, out)
			}
			if left := harness.Get(os.ReadDir(dir))(t); len(left) != 2 {
				t.Errorf("a failed save leaves %v", left)
			}
		})
	}
}
