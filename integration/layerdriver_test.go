package integration

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"berth/image/erofs"
	"berth/integration/fixture"
	"berth/integration/harness"
)

// layeredImage pushes an image. Its second layer changes and deletes files of the first one.
func layeredImage(t *testing.T, tag string) (name, id string) {
	t.Helper()
	img := harness.BuildImage(t, v1.Config{},
		fixture.Tree{fixture.Dir("d", 0o1777), fixture.File("d/old", 0o644, "old\n"), fixture.File("d/kept", 0o644, "kept "+tag+"\n"), fixture.File("gone", 0o644, "")},
		fixture.Tree{fixture.File("d/new", 0o600, "new\n"), fixture.File("d/.wh.old", 0o644, ""), fixture.File(".wh.gone", 0o644, "")})
	return harness.Push(t, harness.Registry, "layered:"+tag, img)
}

const showLayered = "cat /d/kept /d/new; ls /d; stat -c %a /d; test ! -e /gone"

// Containers see the same content with each layer driver. Images of another driver remain usable.
func TestLayerDrivers(t *testing.T) {
	if err := erofs.Probe("/var/tmp"); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
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

	d.SetConfig(t, `layer_driver = "erofs"`, `layer_driver = "directory"`)
	d.Restart(t)
	harness.Equal(t, "driver", harness.Get(d.Cri.Status(t.Context(), true))(t).Info["layerDriver"], `"directory"`)
	harness.Equal(t, "the container from before the restart", running.Exec(t, "cat", "/e/kept"), "kept drivers\nmore")
	harness.Equal(t, "pulled again", d.Pull(t, name), id)
	harness.Equal(t, "EROFS under directory", pod.Sh(t, showLayered, harness.Image(name)), want)
	other, _ := layeredImage(t, "other")
	d.Pull(t, other)
	harness.Equal(t, "a directory", pod.Sh(t, showLayered, harness.Image(other)), strings.ReplaceAll(want, "drivers", "other"))

	d.SetConfig(t, `layer_driver = "directory"`, `layer_driver = "auto"`)
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
