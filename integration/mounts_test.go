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

	"berth/image/erofs"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

const (
	privateMount  = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	hostToCtr     = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	bidirectional = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
)

// privilegedPod allows privileged containers, which may mount.
var privilegedPod = harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.Privileged = true })

// sees reports whether a running container has a mount at a path.
func sees(t *testing.T, c *harness.Container, path string) bool {
	t.Helper()
	return slices.Contains(machine.Mountpoints(t, c.Pid(t)), path)
}

// A mount below a read-only volume is read-only only with recursive_read_only.
func TestContainerRecursiveReadOnly(t *testing.T) {
	d := harness.StartDaemon(t)
	testRecursiveReadOnly(t, d.RunPod(t, harness.HostNetwork))
}

func testRecursiveReadOnly(t *testing.T, pod *harness.Pod) {
	t.Helper()
	host := t.TempDir()
	sub := filepath.Join(host, "sub")
	harness.Must(t, os.Mkdir(sub, 0o755))
	harness.Must(t, syscall.Mount("sub", sub, "tmpfs", 0, ""))
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(sub, 0)) })
	for _, recursive := range []bool{false, true} {
		c := pod.Run(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Readonly: true, RecursiveReadOnly: recursive}))
		_, _, err := pod.D.Cri.ExecSync(t.Context(), c.Id, []string{"touch", "/v/sub/file"}, 0)
		harness.Equal(t, fmt.Sprintf("a file can be made below a volume with recursive_read_only %v", recursive), err == nil, !recursive)
		harness.Equal(t, "reported recursive_read_only", c.Status(t).Mounts[0].RecursiveReadOnly, recursive)
		c.Stop(t, 0)
	}
}

// Mounts propagate in both directions. A container's mounts stay on the host after the container's
// exit, because storage drivers need them. An unmount on either side removes them.
func TestMountPropagation(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, privilegedPod)
	for _, c := range []struct {
		propagation       runtimeapi.MountPropagation
		toContainer, back bool
	}{
		{privateMount, false, false},
		{hostToCtr, true, false},
		{bidirectional, true, true},
	} {
		t.Run(c.propagation.String(), func(t *testing.T) {
			host := machine.HostDir(t, "down", "up", "stays")
			down, up, stays := filepath.Join(host, "down"), filepath.Join(host, "up"), filepath.Join(host, "stays")
			ctr := pod.Run(t, harness.Security(harness.Privileged), harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Propagation: c.propagation}))
			machine.MountTmpfs(t, down, syscall.MS_SHARED)
			harness.Equal(t, "a mount of the host reaches the container", sees(t, ctr, "/v/down"), c.toContainer)
			harness.Must(t, syscall.Unmount(down, 0))
			harness.Equal(t, "the mount is left after the unmount on the host", sees(t, ctr, "/v/down"), false)

			ctr.Exec(t, "mount", "-t", "tmpfs", "up", "/v/up")
			harness.Equal(t, "a mount of the container reaches the host", machine.IsMountpoint(t, up), c.back)
			ctr.Exec(t, "umount", "/v/up")
			harness.Equal(t, "the mount is left after the unmount in the container", machine.IsMountpoint(t, up), false)

			ctr.Exec(t, "mount", "-t", "tmpfs", "stays", "/v/stays")
			harness.Must(t, syscall.Kill(ctr.Pid(t), syscall.SIGKILL))
			ctr.WaitExited(t)
			harness.Equal(t, "the mount stays after the container's exit", machine.IsMountpoint(t, stays), c.back)
			if c.back {
				harness.Must(t, syscall.Unmount(stays, 0))
			}
		})
	}
}

// Containers of two daemons share their mounts, although the first daemon was killed.
func TestBidirectionalMountAcrossKilledDaemon(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, privilegedPod)
	host := machine.HostDir(t, "one", "two")
	volume := harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, Propagation: bidirectional})
	first := pod.Run(t, harness.Security(harness.Privileged), volume)
	first.Exec(t, "mount", "-t", "tmpfs", "one", "/v/one")
	d.Kill(t)
	harness.Equal(t, "mount without a daemon", machine.IsMountpoint(t, filepath.Join(host, "one")), true)
	d.Start(t)
	d.WaitIdle(t)
	second := pod.Run(t, harness.Security(harness.Privileged), volume)
	harness.Equal(t, "the second container sees the first's mount", sees(t, second, "/v/one"), true)
	first.Exec(t, "mount", "-t", "tmpfs", "two", "/v/two")
	harness.Equal(t, "the second container sees a later mount", sees(t, second, "/v/two"), true)
	second.Exec(t, "umount", "/v/one")
	harness.Equal(t, "the host still has the unmounted mount", machine.IsMountpoint(t, filepath.Join(host, "one")), false)
	harness.Equal(t, "the first container still has the unmounted mount", sees(t, first, "/v/one"), false)
	first.Exec(t, "umount", "/v/two")
	harness.Equal(t, "the host has the later mount", machine.IsMountpoint(t, filepath.Join(host, "two")), false)
}

// kubelet's mounts reach containers of launchers that were started before the mounts.
func TestVolumeMountedAfterLaunchersStarted(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	d.WaitIdle(t)
	host := machine.HostDir(t, "volume")
	volume := filepath.Join(host, "volume")
	machine.MountTmpfs(t, volume, syscall.MS_SHARED)
	harness.Must(t, os.WriteFile(filepath.Join(volume, "file"), []byte("late\n"), 0o600))
	idle := machine.ChildrenOf(d.Cmd.Process.Pid)
	ctr := pod.Run(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume}))
	var parent int
	_, err := fmt.Sscan(machine.StatusField(t, ctr.Pid(t), "PPid"), &parent)
	harness.Must(t, err)
	harness.Equal(t, "the container has such a launcher", slices.Contains(idle, parent), true)
	for _, propagation := range []runtimeapi.MountPropagation{privateMount, hostToCtr, bidirectional} {
		harness.Equal(t, "content with "+propagation.String(),
			pod.Sh(t, "cat /v/file", harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume, Propagation: propagation})), "late\n")
	}
}

// A mount of the host does not reach the launchers if its parent is private or became shared later.
// Containers see such a mount like any other.
func TestVolumeOnPrivateMount(t *testing.T) {
	host := machine.HostDir(t, "private", "later")
	private, later := filepath.Join(host, "private"), filepath.Join(host, "later")
	machine.MountTmpfs(t, private, syscall.MS_PRIVATE)
	machine.MountTmpfs(t, later, syscall.MS_PRIVATE)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, privilegedPod)
	d.WaitIdle(t)

	volume := filepath.Join(private, "a/volume")
	harness.Must(t, os.MkdirAll(volume, 0o755))
	machine.MountTmpfs(t, volume, syscall.MS_PRIVATE)
	harness.Must(t, os.WriteFile(filepath.Join(volume, "file"), []byte("late\n"), 0o600))
	harness.Equal(t, "content of a volume", pod.Sh(t, "cat /v/file", harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume})), "late\n")
	harness.Equal(t, "content of a directory that holds one",
		pod.Sh(t, "cat /v/volume/file", harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Dir(volume)})), "late\n")
	harness.Must(t, syscall.Unmount(volume, 0))
	harness.Equal(t, "content after it was unmounted", pod.Sh(t, "ls -A /v", harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: volume})), "")

	harness.Must(t, os.Mkdir(filepath.Join(later, "up"), 0o755))
	harness.Must(t, syscall.Mount("", later, "", syscall.MS_SHARED, ""))
	ctr := pod.Run(t, harness.Security(harness.Privileged), harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: later, Propagation: bidirectional}))
	ctr.Exec(t, "mount", "-t", "tmpfs", "up", "/v/up")
	harness.Equal(t, "a mount of the container reaches the host", machine.IsMountpoint(t, filepath.Join(later, "up")), true)
	ctr.Exec(t, "umount", "/v/up")
}

// Network namespaces are pinned by mounts, too, and work on a private mount.
func TestNetNSOnPrivateMount(t *testing.T) {
	host := machine.HostDir(t, "private")
	private := filepath.Join(host, "private")
	machine.MountTmpfs(t, private, syscall.MS_PRIVATE)
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("network.netns_dir = %q", private)))
	harness.Equal(t, "a container of a pod runs", d.RunPod(t).Sh(t, "ls /sys/class/net"), "eth0\nlo\n")
}

func TestMountPropagationRefused(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	host := machine.HostDir(t, "private", "slave")
	private, slave := filepath.Join(host, "private"), filepath.Join(host, "slave")
	machine.MountTmpfs(t, private, syscall.MS_PRIVATE)
	machine.MountTmpfs(t, slave, syscall.MS_SLAVE)
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
		ctr, err := pod.TryCreate(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: c.source, Propagation: c.propagation}))
		if c.says == "" {
			harness.Must(t, err)
			ctr.Start(t)
			continue
		}
		harness.WantCode(t, err, codes.FailedPrecondition, fmt.Sprintf("path %q is mounted on %q but it %s", c.source, c.source, c.says))
	}
}

// recursive_read_only needs readonly and propagation PRIVATE (KEP-3857).
func TestRecursiveReadOnlyRules(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	host := machine.HostDir(t)
	for _, m := range []*runtimeapi.Mount{
		{RecursiveReadOnly: true},
		{RecursiveReadOnly: true, Readonly: true, Propagation: hostToCtr},
		{RecursiveReadOnly: true, Readonly: true, Propagation: bidirectional},
	} {
		m.ContainerPath, m.HostPath = "/v", host
		_, err := pod.TryCreate(t, harness.Mount(m))
		harness.WantCode(t, err, codes.InvalidArgument, "/v", "recursive_read_only")
	}
}

// The effect of mount_options (KEP-5855) is checked inside the container.
func TestMountOptions(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, privilegedPod)
	host := machine.HostDir(t)
	harness.Must(t, os.WriteFile(filepath.Join(host, "run"), []byte("#!/bin/sh\necho ran\n"), 0o700)) //nolint:gosec // executable
	harness.Must(t, unix.Mknod(filepath.Join(host, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
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
			ctr := pod.Run(t, harness.Mount(m), harness.Security(harness.Privileged))
			stdout, _, err := d.Cri.ExecSync(t.Context(), ctr.Id, []string{"sh", "-c", try}, 0)
			if err != nil && harness.ExitCode(err) < 0 {
				t.Fatal(err)
			}
			harness.Equal(t, "output of the container", string(stdout), c.want)
			flags := ctr.Exec(t, "sh", "-c", "grep ' /v ' /proc/mounts | cut -d' ' -f4")
			for _, o := range []string{"noexec", "nodev", "nosuid"} {
				harness.Equal(t, o+" in "+flags, slices.Contains(strings.Split(flags, ","), o), slices.Contains(c.options, o))
			}
			harness.Equal(t, "reported options", fmt.Sprint(ctr.Status(t).Mounts[0].MountOptions), fmt.Sprint(c.options))
		})
	}
	for _, o := range []string{"exec", "remount", "bind", "rshared", "size=1", "noexec,nodev", ""} {
		_, err := pod.TryCreate(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: host, MountOptions: []string{o}}))
		harness.WantCode(t, err, codes.InvalidArgument, "/v", fmt.Sprintf("unknown mount option %q", o))
	}
}

// berth follows links of a host_path on the host. It creates a missing directory, as containerd and
// CRI-O do, but not the missing target of a link.
func TestMountSources(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	host := machine.HostDir(t, "real")
	harness.Must(t, os.WriteFile(filepath.Join(host, "real/file"), []byte("content\n"), 0o600))
	for link, target := range map[string]string{"link": "real", "twice": host + "/link", "tofile": "twice/file", "dangling": "nothing"} {
		harness.Must(t, os.Symlink(target, filepath.Join(host, link)))
	}
	for source, file := range map[string]string{"real": "/v/file", "link": "/v/file", "twice": "/v/file", "link/file": "/v", "tofile": "/v"} {
		harness.Equal(t, source, pod.Sh(t, "cat "+file, harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Join(host, source)})), "content\n")
	}
	pod.Sh(t, "echo new >/v/file", harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Join(host, "not/there/yet")}))
	harness.Equal(t, "content of a file in a new directory", string(harness.Get(os.ReadFile(filepath.Join(host, "not/there/yet/file")))(t)), "new\n")
	for source, text := range map[string]string{"dangling": "does not exist", "dangling/below": "dangling", "real/file/below": "not a directory"} {
		_, err := pod.TryCreate(t, harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: filepath.Join(host, source)}))
		harness.WantCode(t, err, codes.InvalidArgument, source, text)
	}
	harness.Equal(t, "target of the link", fmt.Sprint(machine.ReadDir(host)), "[dangling link not real tofile twice]")
}

// Links of an image at mount points are resolved inside the container.
func TestMountTargetsAreSymlinks(t *testing.T) {
	host := machine.HostDir(t, "volume", "escape")
	escape := filepath.Join(host, "escape")
	harness.Must(t, os.WriteFile(filepath.Join(host, "volume/file"), []byte("content\n"), 0o600))
	name, _ := harness.Push(t, harness.Registry, "targets:links", harness.BuildImage(t, v1.Config{}, fixture.Tree{
		fixture.Symlink("data", escape), fixture.Symlink("up", "../../../../.."+escape)}))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	volume := func(at string) harness.ContainerOption {
		return harness.Mount(&runtimeapi.Mount{ContainerPath: at, HostPath: filepath.Join(host, "volume")})
	}
	harness.Equal(t, "mount at a link", pod.Sh(t, "cat /data/file "+escape+"/file", harness.Image(name), volume("/data")), "content\ncontent\n")
	harness.Equal(t, "mount below a link", pod.Sh(t, "cat /up/below/file", harness.Image(name), volume("/up/below")), "content\n")
	harness.Equal(t, "files created on the host", fmt.Sprint(machine.ReadDir(escape)), "[]")
}

// With procMount: Unmasked (KEP-4265, allowed only in user namespaces) the container sees all of
// proc. A nested user namespace may then mount another proc, which container engines in containers
// need. The kernel refuses that mount while paths of proc are hidden (mount_too_revealing in
// fs/namespace.c).
func TestUnmaskedProc(t *testing.T) {
	const base = 17 * usernsLength
	d := harness.StartDaemon(t)
	pod := runMapped(t, d, base)
	unmasked := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.MaskedPaths, s.ReadonlyPaths = nil, nil
		// The default AppArmor profile allows no mounts.
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	})
	const look = `mkdir -p /mnt; stat -c %F /proc/keys; grep -q " /proc/" /proc/self/mountinfo && echo hidden || echo all
		unshare -U -r -m -p -f mount -t proc proc /mnt 2>/dev/null && echo mounted || echo refused`
	harness.Equal(t, "masked", pod.Sh(t, look, inUserNamespace(base)), "character special file\nhidden\nrefused\n")
	harness.Equal(t, "unmasked", pod.Sh(t, look, inUserNamespace(base), unmasked), "regular empty file\nall\nmounted\n")
}

// mountsWithProc returns the lines that Kubernetes' tests DefaultProcMount and ProcMount count, and
// the number of read-only mounts in them.
func mountsWithProc(t *testing.T, c *harness.Container) (lines []string, readOnly int) {
	t.Helper()
	out := strings.TrimSpace(c.Exec(t, "/bin/sh", "-ec", "mount | grep /proc"))
	return strings.Split(out, "\n"), strings.Count(out, "(ro")
}

// Kubernetes' tests count the lines of mounts that contain "/proc". With Unmasked this must be only
// proc, so the root's line must not name layers below /proc.
func TestMountsWithProc(t *testing.T) {
	for i, driver := range []string{"directory", "erofs"} {
		t.Run(driver, func(t *testing.T) {
			if err := erofs.Probe("/var/tmp"); driver == "erofs" && errors.Is(err, errors.ErrUnsupported) {
				t.Skip("NOT TESTED: ", err)
			}
			base := uint32(20+i) * usernsLength
			d := harness.StartDaemon(t, harness.WithLayerDriver(driver))
			masked := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
				s.MaskedPaths, s.ReadonlyPaths = []string{"/proc/keys"}, []string{"/proc/bus", "/proc/sys"}
			})
			unmasked := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.MaskedPaths, s.ReadonlyPaths = nil, nil })

			host := d.RunPod(t)
			lines, readOnly := mountsWithProc(t, host.Run(t, masked))
			harness.Equal(t, "default, mounts: "+fmt.Sprintf("%q", lines), len(lines), 4)
			harness.Equal(t, "default, read-only mounts", readOnly, 2)

			pod := runMapped(t, d, base)
			lines, readOnly = mountsWithProc(t, pod.Run(t, inUserNamespace(base), unmasked))
			harness.Equal(t, "unmasked, mounts: "+fmt.Sprintf("%q", lines), len(lines), 1)
			harness.Equal(t, "unmasked, read-only mounts", readOnly, 0)
		})
	}
}
