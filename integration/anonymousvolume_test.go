package integration

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// declaring pushes an image with VOLUMEs.
func declaring(t *testing.T, tag string, volumes []string, trees ...fixture.Tree) (name string) {
	t.Helper()
	config := v1.Config{Volumes: map[string]struct{}{}}
	for _, v := range volumes {
		config.Volumes[v] = struct{}{}
	}
	name, _ = harness.Push(t, harness.Registry, "declaring:"+tag, harness.BuildImage(t, config, trees...))
	return name
}

// netRaw is the file capability cap_net_raw=ep.
const netRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// volumeTree is the content of several volumes: /data with all kinds of files, and /empty.
func volumeTree() fixture.Tree {
	return fixture.Tree{
		fixture.Dir("data", 0o1750).Owned(1000, 2000),
		fixture.File("data/file", 0o4640, "content\n").Owned(1000, 2000).WithXattr("security.capability", netRaw),
		fixture.Hardlink("data/second", "data/file"),
		fixture.Symlink("data/link", "/etc/passwd").Owned(7, 8),
		fixture.Dir("data/sub", 0o700), fixture.File("data/sub/below", 0o600, "below\n"),
		fixture.CharDevice("data/null", 0o666, 1, 3),
		fixture.Dir("empty", 0o2770).Owned(70, 71),
		fixture.File("plain", 0o644, "a file\n"),
	}
}

// volumeScript prints what TestAnonymousVolumes compares, and writes into each volume.
const volumeScript = `
stat -c "%n %a %u:%g" /data /data/file /data/link /data/sub/below /data/null /empty /missing /missing/deep
stat -c "%n %Y" /data/file
cat /data/file /data/second /data/sub/below /plain
readlink /data/link
[ $(stat -c %i /data/file) = $(stat -c %i /data/second) ] && echo linked
for v in /data /empty /missing /missing/deep /data/sub; do
	grep -q " $v " /proc/mounts && touch $v/new && echo $v is writable
done
for path in /new /plain; do touch $path 2>/dev/null && echo $path is writable; done
true
`

const volumeOutput = `/data 1750 1000:2000
/data/file 4640 1000:2000
/data/link 777 7:8
/data/sub/below 600 0:0
/data/null 666 0:0
/empty 2770 70:71
/missing 755 0:0
/missing/deep 755 0:0
/data/file 1700000000
content
content
below
a file
/etc/passwd
linked
/data is writable
/empty is writable
/missing is writable
/missing/deep is writable
/data/sub is writable
`

// A container gets a directory of its own for each VOLUME of its image, with the image's content,
// owners and modes, also with a read-only root filesystem.
func TestAnonymousVolumes(t *testing.T) {
	const base = 5 * usernsLength
	volumes := []string{"/data", "/data/sub/", "empty", "//missing", "/missing/deep", "/plain", "/", "/proc", "/dev/shm", "/etc/hosts"}
	name := declaring(t, "kinds", volumes, volumeTree())
	readOnly := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true })
	for _, driver := range []string{"directory", "erofs"} {
		t.Run(driver, func(t *testing.T) {
			if driver == "erofs" {
				needEROFS(t)
			}
			d := harness.StartDaemon(t, harness.WithLayerDriver(driver))
			plain := d.RunPod(t, harness.HostNetwork)
			mapped := d.RunPod(t, harness.HostNetwork, userNamespace(base))
			for _, c := range []struct {
				name    string
				pod     *harness.Pod
				options []harness.ContainerOption
				more    string
			}{
				{"plain", plain, nil, "/new is writable\n/plain is writable\n"},
				{"read-only root", plain, []harness.ContainerOption{readOnly}, ""},
				{"user namespace", mapped, []harness.ContainerOption{inUserNamespace(base)}, "/new is writable\n/plain is writable\n"},
				{"both", mapped, []harness.ContainerOption{inUserNamespace(base), readOnly}, ""},
			} {
				t.Run(c.name, func(t *testing.T) {
					options := append(c.options, harness.Image(name))
					harness.Equal(t, "output", c.pod.Sh(t, volumeScript, options...), volumeOutput+c.more)
					harness.Equal(t, "a new file in the next container", c.pod.Sh(t, "ls -A /empty /missing/deep", options...), "/empty:\n\n/missing/deep:\n")
				})
			}
		})
	}
}

// hostVolume returns the host's path of a container's volume, by its place among the image's.
func hostVolume(d *harness.Daemon, c *harness.Container, number int) string {
	return filepath.Join(d.Root, "rootfs", c.Id, "volumes", fmt.Sprint(number))
}

// The files on the host belong to the users of the pod's namespace, as those of the writable layer.
// File capabilities work there.
func TestAnonymousVolumeOwnersOnHost(t *testing.T) {
	const base = 6 * usernsLength
	name := declaring(t, "owners", []string{"/data", "/missing", "/tools"}, volumeTree(), fixture.Tree{
		fixture.Dir("tools", 0o755), fixture.File("tools/cat", 0o755, busybox(t)).WithXattr("security.capability", netRaw),
	})
	d := harness.StartDaemon(t)
	pod := runMapped(t, d, base)
	c := pod.Run(t, harness.Image(name), inUserNamespace(base), harness.RunAs(1234))
	harness.Equal(t, "owner of a volume", owner(t, hostVolume(d, c, 0)), fmt.Sprintf("%d:%d", base+1000, base+2000))
	harness.Equal(t, "owner of a file", owner(t, hostVolume(d, c, 0)+"/file"), fmt.Sprintf("%d:%d", base+1000, base+2000))
	harness.Equal(t, "owner of a new volume", owner(t, hostVolume(d, c, 1)), fmt.Sprintf("%d:%d", base, base))
	if status := c.Exec(t, "/tools/cat", "/proc/self/status"); !harness.Contains(status, "CapEff:\t0000000000002000") {
		t.Errorf("a program in a volume lacks its file capability:\n%s", status)
	}
}

// busybox is the program of the base image.
func busybox(t *testing.T) string {
	t.Helper()
	return string(harness.Get(os.ReadFile("/bin/busybox"))(t))
}

// No symbolic link of an image leads a volume or its content out of the container
// (CVE-2022-23648).
func TestAnonymousVolumesStayInside(t *testing.T) {
	d := harness.StartDaemon(t)
	secret := filepath.Join(d.Dir, "secret")
	harness.Must(t, os.Mkdir(secret, 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(secret, "key"), []byte("host"), 0o644))
	up := strings.Repeat("../", 12)
	name := declaring(t, "hostile",
		[]string{"/absolute", "/relative", "/parent/x/etc", "/proc-root", "/loop", "/inside", "/dangling", "/a/" + up + "dots"},
		fixture.Tree{
			fixture.Symlink("absolute", secret), fixture.Symlink("relative", up+secret[1:]), fixture.Symlink("parent", up),
			fixture.Symlink("proc-root", "/proc/self/root"+secret), fixture.Symlink("loop", "loop"),
			fixture.Dir("real", 0o755), fixture.File("real/file", 0o644, "inside\n"), fixture.Symlink("inside", "real"),
			fixture.Symlink("real/out", secret+"/key"), fixture.Symlink("dangling", "/not/there"),
		})
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Image(name))
	harness.Equal(t, "files", c.Exec(t, "sh", "-c", "ls -A /absolute/ /relative/ /dots "+secret), "/absolute/:\n\n/dots:\n\n/relative/:\n\n"+secret+":")
	harness.Equal(t, "content", c.Exec(t, "cat", "/inside/file"), "inside")
	harness.Equal(t, "mount of a symlink", c.Exec(t, "sh", "-c", "grep -q ' /real ' /proc/mounts && touch /dangling/new && ls /not/there"), "new")
	if out := c.Exec(t, "sh", "-c", "cat /real/out 2>&1 || true"); !harness.Contains(out, "can't open") {
		t.Errorf("the container reads a file of the host: %s", out)
	}
	entries := harness.Get(os.ReadDir(secret))(t)
	harness.Equal(t, "files of the host's directory", len(entries), 1)
	for _, m := range machine.Mountpoints(t, 1) {
		if harness.Contains(m, c.Id) {
			t.Errorf("the host has a mount at %s", m)
		}
	}
}

// A mount of the request takes the place of a volume at its path or below it. It lies on top of a
// volume at a parent, also through a symbolic link. kubelet sees its own mounts only.
func TestRequestedMountsWin(t *testing.T) {
	name := declaring(t, "mounts", []string{"/data", "/kept", "/parent/volume", "/var/run/volume", "/run2"}, fixture.Tree{
		fixture.Dir("data", 0o755), fixture.File("data/image", 0o644, ""), fixture.Symlink("shortcut", "kept/below"),
		fixture.Dir("var", 0o755), fixture.Symlink("var/run", "../run"), fixture.Dir("run", 0o755), fixture.Symlink("run2", "run"),
	})
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	var mounts []harness.ContainerOption
	for _, at := range []string{"/data/", "/parent", "/shortcut", "/var/run"} {
		host := t.TempDir()
		harness.Must(t, os.WriteFile(filepath.Join(host, "host"), nil, 0o644))
		mounts = append(mounts, harness.Mount(&runtimeapi.Mount{ContainerPath: at, HostPath: host}))
	}
	c := pod.Run(t, append(mounts, harness.Image(name))...)
	harness.Equal(t, "files", c.Exec(t, "sh", "-c", "ls -A /data /parent /kept/below /run"),
		"/data:\nhost\n\n/kept/below:\nhost\n\n/parent:\nhost\n\n/run:\nhost")
	harness.Equal(t, "volumes", strings.Join(names(t, filepath.Dir(hostVolume(d, c, 0))), " "), "1")
	harness.Equal(t, "number of mounts in the status", len(c.Status(t).Mounts), len(mounts))
}

// The mount of a CDI device takes the place of volumes below it, and gets no directories for them.
func TestVolumesBelowMountOfDevice(t *testing.T) {
	dir, option := cdiDir(t)
	lib := machine.HostDir(t)
	harness.Must(t, os.WriteFile(filepath.Join(lib, "lib.so"), nil, 0o644))
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{"one": map[string]any{
		"mounts": []any{map[string]any{"hostPath": lib, "containerPath": "/vendor", "options": []string{"ro", "rbind"}}},
	}})
	d := harness.StartDaemon(t, option)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Image(declaring(t, "below", []string{"/vendor/data", "/kept"})), harness.Cdi("one"))
	harness.Equal(t, "files", c.Exec(t, "sh", "-c", "ls -A /vendor /kept && grep -q ' /kept ' /proc/mounts"), "/kept:\n\n/vendor:\nlib.so")
}

// names lists a directory.
func names(t *testing.T, dir string) []string {
	t.Helper()
	found := map[string]bool{}
	for _, e := range harness.Get(os.ReadDir(dir))(t) {
		found[e.Name()] = true
	}
	return slices.Sorted(maps.Keys(found))
}

// Volumes outlive the daemon and a change of the option. Their usage counts, and they end with the
// container.
func TestAnonymousVolumeLife(t *testing.T) {
	name := declaring(t, "life", []string{"/data"}, volumeTree())
	const bind, ignore = `image.volumes = "bind"`, `image.volumes = "ignore"`
	d := harness.StartDaemon(t, harness.WithConfig(bind), harness.WithConfig(`container.stats_period = "100ms"`))
	pod := d.RunPod(t, harness.HostNetwork)
	c, created := pod.Run(t, harness.Image(name)), pod.Create(t, harness.Image(name))
	c.Exec(t, "dd", "if=/dev/zero", "of=/data/large", "bs=64k", "count=160")
	harness.Eventually(t, "the volume counts", func() error {
		if used := containerStats(t, c).WritableLayer.GetUsedBytes().GetValue(); used < 10<<20 || used > 12<<20 {
			return fmt.Errorf("the statistics show %d bytes", used)
		}
		return nil
	})
	d.Stop(t)
	d.SetConfig(t, bind, ignore)
	d.Start(t)
	harness.Equal(t, "content after a restart", c.Exec(t, "cat", "/data/file"), "content")
	created.Start(t)
	created.Exec(t, "sh", "-c", "grep -q ' /data ' /proc/mounts && touch /data/new")
	ignored := pod.Run(t, harness.Image(name))
	harness.Equal(t, "content without the volume", ignored.Exec(t, "sh", "-c", "! grep -q ' /data ' /proc/mounts && cat /data/file"), "content")
	d.StateMatches(t)
	for _, c := range []*harness.Container{c, created} {
		harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
		harness.Eventually(t, "the volume is removed", func() error {
			if _, err := os.Lstat(hostVolume(d, c, 0)); !os.IsNotExist(err) {
				return fmt.Errorf("lstat: %v", err)
			}
			return nil
		})
	}
}

// What a container writes into its volumes, and what the image puts there, counts to
// disk.writable_layer_limit.
func TestAnonymousVolumeQuota(t *testing.T) {
	fits := declaring(t, "fits", []string{"/data", "/other"}, fixture.Tree{
		fixture.Dir("data", 0o755), fixture.File("data/file", 0o644, strings.Repeat("x", 3<<20)),
	})
	large := declaring(t, "large", []string{"/data"}, fixture.Tree{
		fixture.Dir("data", 0o755), fixture.File("data/file", 0o644, strings.Repeat("x", 9<<20)),
	})
	for fs, mkfs := range map[string][]string{
		"ext4": {"mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota"},
		"xfs":  {"mkfs.xfs", "-q"},
	} {
		t.Run(fs, func(t *testing.T) {
			d := harness.StartDaemon(t, onQuotas(t, mkfs...), harness.WithConfig("disk.writable_layer_limit = 8388608"))
			pod := d.RunPod(t, harness.HostNetwork)
			c := pod.Run(t, harness.Image(fits))
			c.Exec(t, "sh", "-c", "! dd if=/dev/zero of=/other/full bs=64k count=160 2>/dev/null")
			if size := c.Exec(t, "stat", "-c", "%s", "/other/full"); len(size) != len("5000000") || size < "4000000" || size > "5300000" {
				t.Errorf("the container wrote %s bytes", size)
			}
			d.Pull(t, large)
			_, err := pod.TryCreate(t, harness.Image(large))
			harness.WantCode(t, err, codes.ResourceExhausted, "/data")
		})
	}
}

// A volume that does not fit on the disk fails the creation, which leaves nothing.
func TestAnonymousVolumeOnFullDisk(t *testing.T) {
	name := declaring(t, "full", []string{"/data"}, fixture.Tree{
		fixture.Dir("data", 0o755), fixture.File("data/file", 0o644, strings.Repeat("x", 24<<20)),
	})
	d := harness.StartDaemon(t, func(t *testing.T, d *harness.Daemon) {
		disk := filepath.Join(d.Dir, "disk")
		harness.Must(t, os.Mkdir(disk, 0o711))
		harness.Must(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=40m,mode=711"))
		d.Root, d.Mounts = filepath.Join(disk, "root"), append(d.Mounts, disk)
	})
	d.Pull(t, name)
	pod := d.RunPod(t, harness.HostNetwork)
	_, err := pod.TryCreate(t, harness.Image(name))
	harness.WantCode(t, err, codes.ResourceExhausted, "/data", "no space left")
	harness.Eventually(t, "the writable layer is removed", func() error {
		if left := harness.Get(filepath.Glob(d.Root + "/rootfs/*/volumes"))(t); len(left) > 0 {
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
}

// Volumes also work with other runtime programs.
func TestAnonymousVolumesWithHandlers(t *testing.T) {
	const base = 7 * usernsLength
	name := declaring(t, "handlers", []string{"/data", "/empty", "/missing/deep"}, volumeTree())
	for handler, path := range map[string]func(*testing.T) string{"crun": harness.Crun, "runsc": runsc} {
		t.Run(handler, func(t *testing.T) {
			d := harness.StartDaemon(t, harness.WithHandler(handler, path(t)))
			readOnly := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyRootfs = true })
			const script = "cat /data/file && touch /data/new /empty/new /missing/deep/new && stat -c %u:%g /data /empty /missing/deep && ! touch /new 2>/dev/null"
			const want = "content\n1000:2000\n70:71\n0:0\n"
			pod := runPodWith(t, d, handler, harness.HostNetwork)
			harness.Equal(t, "output", pod.Sh(t, script, harness.Image(name), readOnly), want)
			if announced, _ := handlersOf(t, d); announced[handler].GetUserNamespaces() {
				mapped := runPodWith(t, d, handler, userNamespace(base))
				harness.Equal(t, "output in a user namespace", mapped.Sh(t, script, harness.Image(name), readOnly, inUserNamespace(base)), want)
			}
		})
	}
}
