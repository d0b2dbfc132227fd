package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
)

const (
	privateMount  = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	hostToCtr     = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	bidirectional = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
)

// privilegedPod may have privileged containers, which may mount.
var privilegedPod = podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true })

// hostDir makes a directory of the host with the given directories in it.
func hostDir(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		must(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
	}
	return dir
}

// mountTmpfs mounts a tmpfs on the host with the given propagation until the test ends.
func mountTmpfs(t *testing.T, path string, propagation uintptr) {
	t.Helper()
	must(t, syscall.Mount("test", path, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, ignoreErrno(syscall.Unmount(path, syscall.MNT_DETACH), syscall.EINVAL)) })
	must(t, syscall.Mount("", path, "", propagation, ""))
}

func ignoreErrno(err error, except syscall.Errno) error {
	if errors.Is(err, except) {
		return nil
	}
	return err
}

func isMountpoint(t *testing.T, path string) bool {
	t.Helper()
	return slices.Contains(mountpoints(t, os.Getpid()), path)
}

// sees tells whether a running container has a mount at a path.
func (c *container) sees(t *testing.T, path string) bool {
	t.Helper()
	return slices.Contains(mountpoints(t, c.pid(t)), path)
}

// A mount below a read-only volume is read-only only if recursion is asked for.
func TestContainerRecursiveReadOnly(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	host := t.TempDir()
	sub := filepath.Join(host, "sub")
	must(t, os.Mkdir(sub, 0o755))
	must(t, syscall.Mount("sub", sub, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, syscall.Unmount(sub, 0)) })
	for _, recursive := range []bool{false, true} {
		c := pod.run(t, mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Readonly: true, RecursiveReadOnly: recursive}))
		_, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"touch", "/v/sub/file"}, 0)
		equal(t, fmt.Sprintf("a file can be made below a volume with recursive_read_only %v", recursive), err == nil, !recursive)
		equal(t, "reported recursive_read_only", c.status(t).Mounts[0].RecursiveReadOnly, recursive)
		c.stop(t, 0)
	}
}

// What propagates in which direction. The mounts of a container stay on the host when it
// ends, as drivers of storage need it, and go when somebody unmounts them, here or there.
func TestMountPropagation(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, privilegedPod)
	for _, c := range []struct {
		propagation       runtimeapi.MountPropagation
		toContainer, back bool
	}{
		{privateMount, false, false},
		{hostToCtr, true, false},
		{bidirectional, true, true},
	} {
		t.Run(c.propagation.String(), func(t *testing.T) {
			host := hostDir(t, "down", "up", "stays")
			down, up, stays := filepath.Join(host, "down"), filepath.Join(host, "up"), filepath.Join(host, "stays")
			ctr := pod.run(t, security(privileged), mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Propagation: c.propagation}))
			mountTmpfs(t, down, syscall.MS_SHARED)
			equal(t, "a mount of the host arrives", ctr.sees(t, "/v/down"), c.toContainer)
			must(t, syscall.Unmount(down, 0))
			equal(t, "it is there after it was unmounted on the host", ctr.sees(t, "/v/down"), false)

			ctr.exec(t, "mount", "-t", "tmpfs", "up", "/v/up")
			equal(t, "a mount of the container arrives on the host", isMountpoint(t, up), c.back)
			ctr.exec(t, "umount", "/v/up")
			equal(t, "it is there after it was unmounted in the container", isMountpoint(t, up), false)

			ctr.exec(t, "mount", "-t", "tmpfs", "stays", "/v/stays")
			must(t, syscall.Kill(ctr.pid(t), syscall.SIGKILL))
			ctr.waitExited(t)
			equal(t, "it stays when the container ends", isMountpoint(t, stays), c.back)
			if c.back {
				must(t, syscall.Unmount(stays, 0))
			}
		})
	}
}

// Containers of two daemons, the first of which was killed, share what they mount.
func TestBidirectionalMountAcrossKilledDaemon(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, privilegedPod)
	host := hostDir(t, "one", "two")
	volume := mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Propagation: bidirectional})
	first := pod.run(t, security(privileged), volume)
	first.exec(t, "mount", "-t", "tmpfs", "one", "/v/one")
	d.kill(t)
	equal(t, "mount without a daemon", isMountpoint(t, filepath.Join(host, "one")), true)
	d.start(t)
	d.waitIdle(t)
	second := pod.run(t, security(privileged), volume)
	equal(t, "the second container sees the first's mount", second.sees(t, "/v/one"), true)
	first.exec(t, "mount", "-t", "tmpfs", "two", "/v/two")
	equal(t, "the second container sees a later one", second.sees(t, "/v/two"), true)
	second.exec(t, "umount", "/v/one")
	equal(t, "the host still has it", isMountpoint(t, filepath.Join(host, "one")), false)
	equal(t, "the first container still has it", first.sees(t, "/v/one"), false)
	first.exec(t, "umount", "/v/two")
	equal(t, "the host has the later one", isMountpoint(t, filepath.Join(host, "two")), false)
}

// What kubelet mounts reaches containers of launchers that were started before.
func TestVolumeMountedAfterLaunchersStarted(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	d.waitIdle(t)
	host := hostDir(t, "volume")
	volume := filepath.Join(host, "volume")
	mountTmpfs(t, volume, syscall.MS_SHARED)
	must(t, os.WriteFile(filepath.Join(volume, "file"), []byte("late\n"), 0o600))
	idle := childrenOf(d.cmd.Process.Pid)
	ctr := pod.run(t, mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume}))
	var parent int
	_, err := fmt.Sscan(statusField(t, ctr.pid(t), "PPid"), &parent)
	must(t, err)
	equal(t, "the container is of such a launcher", slices.Contains(idle, parent), true)
	for _, propagation := range []runtimeapi.MountPropagation{privateMount, hostToCtr, bidirectional} {
		equal(t, "content with "+propagation.String(),
			pod.sh(t, "cat /v/file", mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume, Propagation: propagation})), "late\n")
	}
}

// A mount of the host that never reached the launchers, since what it is mounted on is
// private, or to whose changes they are deaf, since it became shared later, is the same to
// containers as any other.
func TestVolumeOnPrivateMount(t *testing.T) {
	host := hostDir(t, "private", "later")
	private, later := filepath.Join(host, "private"), filepath.Join(host, "later")
	mountTmpfs(t, private, syscall.MS_PRIVATE)
	mountTmpfs(t, later, syscall.MS_PRIVATE)
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, privilegedPod)
	d.waitIdle(t)

	volume := filepath.Join(private, "a/volume")
	must(t, os.MkdirAll(volume, 0o755))
	mountTmpfs(t, volume, syscall.MS_PRIVATE)
	must(t, os.WriteFile(filepath.Join(volume, "file"), []byte("late\n"), 0o600))
	equal(t, "content of a volume", pod.sh(t, "cat /v/file", mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume})), "late\n")
	equal(t, "content of a directory that holds one",
		pod.sh(t, "cat /v/volume/file", mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Dir(volume)})), "late\n")
	must(t, syscall.Unmount(volume, 0))
	equal(t, "content after it was unmounted", pod.sh(t, "ls -A /v", mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume})), "")

	must(t, os.Mkdir(filepath.Join(later, "up"), 0o755))
	must(t, syscall.Mount("", later, "", syscall.MS_SHARED, ""))
	ctr := pod.run(t, security(privileged), mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: later, Propagation: bidirectional}))
	ctr.exec(t, "mount", "-t", "tmpfs", "up", "/v/up")
	equal(t, "a mount of the container arrives on the host", isMountpoint(t, filepath.Join(later, "up")), true)
	ctr.exec(t, "umount", "/v/up")
}

// The same for network namespaces, which are pinned by mounts.
func TestNetNSOnPrivateMount(t *testing.T) {
	host := hostDir(t, "private")
	private := filepath.Join(host, "private")
	mountTmpfs(t, private, syscall.MS_PRIVATE)
	d := startDaemon(t, withConfig(fmt.Sprintf("netns_dir = %q", private)))
	equal(t, "a container of a pod runs", d.runPod(t).sh(t, "ls /sys/class/net"), "eth0\nlo\n")
}

func TestMountPropagationRefused(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	host := hostDir(t, "private", "slave")
	private, slave := filepath.Join(host, "private"), filepath.Join(host, "slave")
	mountTmpfs(t, private, syscall.MS_PRIVATE)
	mountTmpfs(t, slave, syscall.MS_SLAVE)
	for _, c := range []struct {
		source      string
		propagation runtimeapi.MountPropagation
		says        string
	}{
		{private, privateMount, ""},
		{private, hostToCtr, "is not a shared or slave mount"},
		{private, bidirectional, "is not a shared mount"},
		{slave, hostToCtr, ""},
		{slave, bidirectional, "is not a shared mount"},
	} {
		ctr, err := pod.tryCreate(t, mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: c.source, Propagation: c.propagation}))
		if c.says == "" {
			must(t, err)
			ctr.start(t)
			continue
		}
		wantCode(t, err, codes.FailedPrecondition, fmt.Sprintf("path %q is mounted on %q but it %s", c.source, c.source, c.says))
	}
}

// recursive_read_only needs readonly and PRIVATE (KEP-3857).
func TestRecursiveReadOnlyRules(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	host := hostDir(t)
	for _, m := range []*runtimeapi.Mount{
		{RecursiveReadOnly: true},
		{RecursiveReadOnly: true, Readonly: true, Propagation: hostToCtr},
		{RecursiveReadOnly: true, Readonly: true, Propagation: bidirectional},
	} {
		m.ContainerPath, m.HostPath = "/v", host
		_, err := pod.tryCreate(t, mount(m))
		wantCode(t, err, codes.InvalidArgument, "/v", "recursive_read_only")
	}
}

// mount_options (KEP-5855), looked at from inside.
func TestMountOptions(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork, privilegedPod)
	host := hostDir(t)
	must(t, os.WriteFile(filepath.Join(host, "run"), []byte("#!/bin/sh\necho ran\n"), 0o700)) //nolint:gosec // is to be run
	must(t, unix.Mknod(filepath.Join(host, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	try := `/v/run 2>/dev/null || echo no exec; cat /v/null 2>/dev/null || echo no dev; touch /v/new 2>/dev/null || echo no write`
	for _, c := range []struct {
		options  []string
		readonly bool
		want     string
	}{
		{nil, false, "ran\n"},
		{[]string{"noexec"}, false, "no exec\n"},
		{[]string{"nodev"}, false, "ran\nno dev\n"},
		{[]string{"noexec", "nodev", "nosuid"}, true, "no exec\nno dev\nno write\n"},
	} {
		t.Run(fmt.Sprint(c.options, c.readonly), func(t *testing.T) {
			m := &runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Readonly: c.readonly, MountOptions: c.options}
			ctr := pod.run(t, mount(m), security(privileged))
			stdout, _, err := d.cri.ExecSync(t.Context(), ctr.id, []string{"sh", "-c", try}, 0)
			if err != nil && exitCode(err) < 0 {
				t.Fatal(err)
			}
			equal(t, "what the container can do", string(stdout), c.want)
			flags := ctr.exec(t, "sh", "-c", "grep ' /v ' /proc/mounts | cut -d' ' -f4")
			for _, o := range []string{"noexec", "nodev", "nosuid"} {
				equal(t, o+" in "+flags, slices.Contains(strings.Split(flags, ","), o), slices.Contains(c.options, o))
			}
			equal(t, "reported options", fmt.Sprint(ctr.status(t).Mounts[0].MountOptions), fmt.Sprint(c.options))
		})
	}
	for _, o := range []string{"exec", "remount", "bind", "rshared", "size=1", "noexec,nodev", ""} {
		_, err := pod.tryCreate(t, mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, MountOptions: []string{o}}))
		wantCode(t, err, codes.InvalidArgument, "/v", fmt.Sprintf("unknown mount option %q", o))
	}
}

// Links of a host_path are followed on the host; a path that does not exist is refused and
// not made, as the CRI asks for.
func TestMountSources(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	host := hostDir(t, "real")
	must(t, os.WriteFile(filepath.Join(host, "real/file"), []byte("content\n"), 0o600))
	for link, target := range map[string]string{"link": "real", "twice": host + "/link", "tofile": "twice/file", "dangling": "nothing"} {
		must(t, os.Symlink(target, filepath.Join(host, link)))
	}
	for source, file := range map[string]string{"real": "/v/file", "link": "/v/file", "twice": "/v/file", "link/file": "/v", "tofile": "/v"} {
		equal(t, source, pod.sh(t, "cat "+file, mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Join(host, source)})), "content\n")
	}
	for _, source := range []string{"missing", "dangling"} {
		_, err := pod.tryCreate(t, mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Join(host, source)}))
		wantCode(t, err, codes.InvalidArgument, source, "does not exist")
		if _, err := os.Stat(filepath.Join(host, source)); !os.IsNotExist(err) {
			t.Errorf("%s was made: %v", source, err)
		}
	}
}

// Links of an image at the places of mounts stay inside of the container.
func TestMountTargetsThatAreLinks(t *testing.T) {
	host := hostDir(t, "volume", "escape")
	escape := filepath.Join(host, "escape")
	must(t, os.WriteFile(filepath.Join(host, "volume/file"), []byte("content\n"), 0o600))
	name, _ := push(t, registry, "targets:links", buildImage(t, v1.Config{}, fixture.Tree{
		fixture.Symlink("data", escape), fixture.Symlink("up", "../../../../.."+escape)}))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	volume := func(at string) containerOption {
		return mount(&runtimeapi.Mount{ContainerPath: at, HostPath: filepath.Join(host, "volume")})
	}
	equal(t, "mount at a link", pod.sh(t, "cat /data/file "+escape+"/file", image(name), volume("/data")), "content\ncontent\n")
	equal(t, "mount below a link", pod.sh(t, "cat /up/below/file", image(name), volume("/up/below")), "content\n")
	equal(t, "what was made on the host", fmt.Sprint(readDir(escape)), "[]")
}
