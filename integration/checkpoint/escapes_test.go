package checkpoint

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// leak is the path of the node's /proc in a process that CRIU restores, as the container sees it.
const leak = "/proc/self/fd/121"

// startRefused restores a checkpoint. One of the calls must fail with cause.
func (s *saved) startRefused(t *testing.T, cause string) {
	t.Helper()
	request := s.identity(t)
	response, err := harness.RawRuntime(t, s.d).RestorePod(t.Context(), request)
	if err == nil {
		s.d.Objects = append(s.d.Objects, response.PodSandboxId, response.RestoredContainers[0].ContainerId)
		restored := &harness.Pod{D: s.d, Id: response.PodSandboxId, Config: request.Config}
		defer restored.Remove(t)
		err = s.d.Cri.StartContainer(t.Context(), response.RestoredContainers[0].ContainerId)
	}
	harness.WantCode(t, err, codes.FailedPrecondition, cause)
}

// nodeDir returns a directory of the node with a directory d and an empty file f.
func nodeDir(t *testing.T) string {
	t.Helper()
	dir := machine.HostDir(t, "d")
	harness.Must(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o644))
	return dir
}

// A process of the original, or another container, can put symbolic links in a volume between
// checkpoint and restore. CRIU opens files as root, and restoring processes hold a descriptor of
// the node's /proc. No link may lead a restored process to the node's files, although this node has
// signed the checkpoint.
func TestRestoreBehindLinkInVolume(t *testing.T) {
	d := startDaemon(t)
	victim := nodeDir(t)
	for name, tc := range map[string]struct{ open, name, target string }{
		"working directory": {"cd /vol/d", "d", leak + "/1/root" + victim + "/d"},
		"open directory":    {"exec 7</vol/d", "d", leak + "/1/root" + victim + "/d"},
		"file":              {"exec 7<>/vol/f", "f", leak + "/1/root" + victim + "/f"},
		"file below a link": {"exec 7<>/vol/d/f", "d", leak + "/1/root" + victim},
		"setting":           {"exec 7</vol/setting", "setting", leak + "/sys/kernel/ostype"},
		"the node's /proc":  {"exec 7</vol/d", "d", leak},
	} {
		t.Run(name, func(t *testing.T) {
			volume := nodeDir(t)
			harness.Must(t, os.WriteFile(filepath.Join(volume, "d/f"), nil, 0o644))
			harness.Must(t, os.WriteFile(filepath.Join(volume, "setting"), nil, 0o444))
			if tc.target == leak { // CRIU compares modes
				harness.Must(t, os.Chmod(filepath.Join(volume, "d"), 0o555))
			}
			pod := d.RunPod(t)
			c := pod.Run(t, harness.Script(tc.open+"; "+counting), harness.Mount(&runtimeapi.Mount{ContainerPath: "/vol", HostPath: volume}))
			waitCounted(t, c, 1)
			s := save(t, pod, c)
			pod.Remove(t)
			harness.Must(t, os.RemoveAll(filepath.Join(volume, tc.name)))
			harness.Must(t, os.Symlink(tc.target, filepath.Join(volume, tc.name)))
			s.startRefused(t, "")
		})
	}
}

// sockets returns a function that makes the option for a container that runs testdata/bound.c.
func sockets(t *testing.T) func(paths ...string) harness.ContainerOption {
	t.Helper()
	path := program(t, "bound")
	return func(paths ...string) harness.ContainerOption {
		return func(c *runtimeapi.ContainerConfig) {
			c.Command = append([]string{"/bound"}, paths...)
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/bound", HostPath: path, Readonly: true})
		}
	}
}

// A unix socket in a volume is restored, and one whose name has a symbolic link of the root
// filesystem. The mounts have the options of the original afterwards.
func TestRestoreKeepsSockets(t *testing.T) {
	d := startDaemon(t)
	volume := machine.HostDir(t)
	pod := d.RunPod(t)
	mount := func(at string) harness.ContainerOption {
		return harness.Mount(&runtimeapi.Mount{ContainerPath: at, HostPath: volume})
	}
	c := pod.Run(t, sockets(t)(), mount("/vol"), mount("/again"), mount("/and-again"), func(c *runtimeapi.ContainerConfig) {
		c.Args = []string{"-c", "ln -s /tmp /run; exec /bound /run/a /vol/b /dev/shm/c"}
		c.Command = []string{"sh"}
	})
	c.WaitOutput(t, "ready")
	before := mountOptions(t, c)
	restored, list := revive(t, pod, c)
	for _, path := range []string{"/run/a", "/vol/b", "/dev/shm/c"} {
		harness.Equal(t, path, list[0].Exec(t, "sh", "-c", "test -S "+path+" && echo is a socket"), "is a socket")
	}
	conn := harness.Get(net.Dial("unix", filepath.Join(volume, "b")))(t)
	harness.Must(t, conn.Close())
	harness.Equal(t, "mounts", mountOptions(t, list[0]), before)
	restored.Remove(t)
}

// mountOptions returns the mount points of a container with their options.
func mountOptions(t *testing.T, c *harness.Container) string {
	t.Helper()
	return c.Exec(t, "sh", "-c", "cut -d ' ' -f 5,6 /proc/1/mountinfo | sort")
}

// CRIU removes the unix sockets of a checkpoint and binds them again. A link in a volume must not
// lead it to a socket of the node. Several numbers of descriptors are tried.
func TestRestoreOfSocketBehindLink(t *testing.T) {
	d := startDaemon(t)
	victim, volume := machine.HostDir(t), machine.HostDir(t)
	socket := filepath.Join(victim, "s")
	node := harness.Get(net.Listen("unix", socket))(t)
	defer func() { harness.Must(t, node.Close()) }()
	before := harness.Get(os.Lstat(socket))(t)
	var names []string
	links := "cd /vol"
	for n := range 128 {
		if n > 24 && n != 121 {
			continue
		}
		harness.Must(t, os.Mkdir(filepath.Join(volume, fmt.Sprint("d", n)), 0o755))
		names = append(names, fmt.Sprintf("/vol/d%d/s", n))
		links += fmt.Sprintf("; mv d%d e%d; ln -s /proc/self/fd/%d/1/root%s d%d", n, n, n, victim, n)
	}
	pod := d.RunPod(t)
	c := pod.Run(t, sockets(t)(names...), harness.Mount(&runtimeapi.Mount{ContainerPath: "/vol", HostPath: volume}))
	c.WaitOutput(t, "ready")
	s := save(t, pod, c)
	c.Exec(t, "sh", "-c", links)
	pod.Remove(t)
	s.startRefused(t, "")
	if after, err := os.Lstat(socket); err != nil || !os.SameFile(before, after) {
		t.Errorf("the node's socket was replaced: %v", err)
	}
}
