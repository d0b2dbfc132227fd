package attacks

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// untouched returns a directory of the host. The test fails if a file is created in it.
func untouched(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(dir, "kept"), []byte("kept"), 0o644))
	t.Cleanup(func() {
		if names := machine.ReadDir(dir); len(names) != 1 || names[0] != "kept" {
			t.Errorf("host directory has the files %v, want only kept", names)
		}
	})
	return dir
}

// tryRun runs a container until it exits. It returns the error if the container is refused.
func tryRun(t *testing.T, p *harness.Pod, opts ...harness.ContainerOption) (output string, refusal error) {
	t.Helper()
	c, err := p.TryCreate(t, opts...)
	if err == nil {
		err = p.D.Cri.StartContainer(t.Context(), c.Id)
	}
	if err != nil {
		if code := harness.CodeOf(err); code == codes.Unknown {
			t.Errorf("refused with the code %s: %v", code, err)
		}
		return "", err
	}
	c.WaitExited(t)
	return c.Output(t), nil
}

// wantRefusal fails the test unless the refusal contains text. A refusal for another reason would
// not test the attack.
func wantRefusal(t *testing.T, refusal error, text string) {
	t.Helper()
	if refusal == nil || !strings.Contains(refusal.Error(), text) {
		t.Errorf("the refusal does not mention %q: %v", text, refusal)
	}
}

// The image's /dev is a symbolic link. Devices and mounts for /dev must not reach the host's /dev.
// The runtime resolves a link to a directory inside the container's root and refuses a link through
// procfs.
func TestCVE_2026_41579_DevIsASymlink(t *testing.T) {
	pod := harness.StartDaemon(t).RunPod(t, harness.HostNetwork)
	dir := untouched(t)
	for target, refused := range map[string]bool{dir: false, "../../../../../.." + dir: false, "/proc/self/fd": true, "/proc/1/root" + dir: true} {
		t.Run(target, func(t *testing.T) {
			name := hostileImage(t, v1.Config{}, fixture.Tree{fixture.Symlink("dev", target)})
			out, refusal := tryRun(t, pod, harness.Image(name), harness.Script("readlink /dev; stat -c %t:%T /dev/null; ls -a "+dir))
			if refused {
				wantRefusal(t, refusal, "/dev mount")
				return
			}
			harness.Must(t, refusal)
			if !strings.HasPrefix(out, target+"\n1:3\n") || strings.Contains(out, "kept") {
				t.Errorf("/dev of the container:\n%s", out)
			}
		})
	}
}

// /etc is a link to a directory of the host. The runtime must not create resolv.conf, hosts and
// hostname there.
func TestCVE_2024_5154_EtcIsASymlink(t *testing.T) {
	d := harness.StartDaemon(t)
	dir := untouched(t)
	pod := d.RunPod(t)
	run := func(target string) (string, error) {
		base := fixture.Tree{fixture.Whiteout("", "etc"), fixture.Symlink("etc", target)}
		return tryRun(t, pod, harness.Image(hostileImage(t, v1.Config{}, base)), harness.Script("cat /etc/resolv.conf; touch /etc/made"))
	}
	for _, target := range []string{dir, "../../../.." + dir} { // resolved inside the container's root
		out, refusal := run(target)
		if refusal != nil || !strings.Contains(out, "nameserver") {
			t.Errorf("/etc -> %s: resolv.conf is %q (%v)", target, out, refusal)
		}
	}
	_, refusal := run("/proc/1/root" + dir)
	wantRefusal(t, refusal, "/etc/")
}

// The working directory is a descriptor of the runtime, which leads out of the container.
func TestCVE_2024_21626_WorkingDirectoryInProc(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	host := canary(t)
	look := harness.Script("cat ../../../../../../../.." + host + " ../../../.." + host + " 2>/dev/null; true")
	for fd := range 24 {
		dir := fmt.Sprintf("/proc/self/fd/%d", fd)
		if out, _ := tryRun(t, pod, look, func(c *runtimeapi.ContainerConfig) { c.WorkingDir = dir }); strings.Contains(out, "the host's own") {
			t.Errorf("the container sees the host through %s", dir)
		}
		link := hostileImage(t, v1.Config{WorkingDir: "/app"}, fixture.Tree{fixture.Symlink("app", dir)})
		if out, _ := tryRun(t, pod, look, harness.Image(link)); strings.Contains(out, "the host's own") {
			t.Errorf("the container sees the host through a link to %s", dir)
		}
	}
}

// A container replaces its working directory with such a link before the next exec starts there.
func TestCVE_2024_21626_WorkingDirectorySwapped(t *testing.T) {
	d := harness.StartDaemon(t)
	host := canary(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/app" })
	harness.Equal(t, "working directory of an exec", c.Exec(t, "pwd"), "/app")
	work := fmt.Sprintf("/proc/%d/root/app", c.Pid(t))
	swap := func(target string) {
		t.Helper()
		harness.Must(t, os.Remove(work))
		harness.Must(t, os.Symlink(target, work))
	}
	swap("/tmp") // is followed
	harness.Equal(t, "working directory of an exec", c.Exec(t, "pwd", "-P"), "/tmp")
	look := []string{"cat"}
	for depth := range 16 { // the directory's depth does not matter
		look = append(look, strings.Repeat("../", depth)+host[1:])
	}
	for fd := range 24 {
		dir := fmt.Sprintf("/proc/self/fd/%d", fd)
		swap(dir)
		response, err := harness.RawRuntime(t, d).ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.Id, Cmd: look})
		if out := string(response.GetStdout()); strings.Contains(out, "the host's own") {
			t.Errorf("ExecSync sees the host through a link to %s (%v)", dir, err)
		}
		var out sessions.Screen
		o := remotecommand.StreamOptions{Stdout: &out}
		_, err = sessions.Spdy.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, look...), o)
		if strings.Contains(out.String(), "the host's own") {
			t.Errorf("Exec sees the host through a link to %s (%v)", dir, err)
		}
	}
}

// A container's init runs the runtime's program until it executes the command. A write to that
// program would change it for all containers and for the next exec.
func TestCVE_2019_5736_RuntimeOverwritten(t *testing.T) {
	programs := []string{filepath.Join(harness.BinDir, "berth-shim"), filepath.Join(harness.BinDir, harness.DaemonProgram)}
	before := sums(t, programs)
	d := harness.StartDaemon(t)
	installed := filepath.Join(d.Root, "bin")
	inRoot := sums(t, filesBelow(t, installed))
	pod := d.RunPod(t, harness.HostNetwork)
	// The script names itself as its interpreter.
	evil := hostileImage(t, v1.Config{}, fixture.Tree{
		fixture.File("evil", 0o755, "#!/proc/self/exe\n"), fixture.Symlink("link", "/proc/self/exe")})
	tryRun(t, pod, harness.Image(evil), harness.Command("/evil"))
	tryRun(t, pod, harness.Image(evil), harness.Command("/link"))
	// A second process tries to write to every new program while execs start and end.
	c := pod.Run(t, harness.Image(evil), harness.Script(`while :; do for p in /proc/[0-9]*; do
		case $(readlink $p/exe) in /bin/busybox) ;; *) echo x 2>/dev/null >>$p/exe && echo written ;; esac
	done; done 2>/dev/null`))
	for range 30 {
		c.Exec(t, "true")
	}
	harness.WantNoText(t, "output of the attacker", c.Output(t), "written")
	for path, sum := range sums(t, programs) {
		if before[path] != sum {
			t.Errorf("%s was changed", path)
		}
	}
	for path, sum := range sums(t, filesBelow(t, installed)) {
		if inRoot[path] != sum {
			t.Errorf("%s was changed", path)
		}
	}
}

// A command's seccomp filter is compiled in another process and passed to the container's first
// process, with its whole configuration. A container with ptrace sees that process and writes to
// what it finds there. It must not change its own filter or another container's.
func TestSeccompFilterOverwritten(t *testing.T) {
	d := harness.StartDaemon(t)
	filtered := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_PTRACE"}}
	})
	pod := d.RunPod(t, harness.HostNetwork)
	// Init shows as a process whose program is in memory. It may end, and another process get its
	// number, before its files are opened here.
	c := pod.Run(t, filtered, harness.Script(`inMemory() { case $(readlink /proc/self/fd/9) in *memfd*) ;; *) false ;; esac; }
	while :; do for p in /proc/[0-9]*; do
		case $(readlink $p/exe) in *memfd*) echo seen
			for f in $p/fd/[3-9] $p/fd/1?; do
				{ inMemory && echo x >&9 && echo written; } 9>>$f
				{ inMemory && echo truncated; } 9>$f
			done
		esac
	done; done 2>/dev/null`))
	refused := func(c *harness.Container) {
		t.Helper()
		harness.Equal(t, "output of unshare in a command", c.Exec(t, "sh", "-c", "unshare -U true 2>/dev/null || echo refused"), "refused")
	}
	for tries := 0; !strings.Contains(c.Output(t), "seen"); tries++ {
		if tries == 300 && runtime.NumCPU() == 1 {
			t.Skip("NOT TESTED: on one processor the container never ran while init did (300 attempts)")
		}
		if tries == 300 {
			t.Fatal("the container did not see init in 300 attempts")
		}
		refused(c)
	}
	for range 10 {
		refused(c)
	}
	refused(pod.Run(t, filtered, harness.Script("exec sleep 1000")))
	if out := c.Output(t); strings.Contains(out, "written") || strings.Contains(out, "truncated") {
		t.Errorf("a command's filter could be changed: %q", out)
	}
}

func filesBelow(t *testing.T, dir string) (files []string) {
	t.Helper()
	harness.Must(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	}))
	return files
}

func sums(t *testing.T, paths []string) map[string][sha256.Size]byte {
	t.Helper()
	all := map[string][sha256.Size]byte{}
	for _, path := range paths {
		content := harness.Get(os.ReadFile(path))(t)
		all[path] = sha256.Sum256(content)
	}
	return all
}

// A volume at /dev contains another file in place of null. The runtime masks a path by a bind mount
// of /dev/null and would mount that file.
func TestCVE_2025_31133_DevNullSwapped(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	volume := t.TempDir()
	null := filepath.Join(volume, "null")
	harness.Must(t, os.WriteFile(filepath.Join(volume, "file"), nil, 0o600))
	harness.Must(t, unix.Mknod(filepath.Join(volume, "full"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 7))))
	dev := harness.Mount(&runtimeapi.Mount{ContainerPath: "/dev", HostPath: volume})
	for _, target := range []string{canary(t), "/proc/self/environ", "/proc/sys/kernel/core_pattern", "file", "full"} {
		harness.Must(t, os.Symlink(target, null))
		_, refusal := tryRun(t, pod, dev, harness.Script("true"))
		wantRefusal(t, refusal, "can't mask paths")
		harness.Must(t, os.Remove(null))
	}
	// In a second volume, null is a device during the check and a link during the bind mount.
	harness.Must(t, unix.Mknod(null, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	masked := harness.Script("stat -c %F:%t:%T /proc/keys")
	out, refusal := tryRun(t, pod, dev, masked)
	harness.Must(t, refusal)
	harness.Equal(t, "masked path", out, "character special file:1:3\n")
	link := filepath.Join(volume, "link")
	harness.Must(t, os.Symlink("/proc/sys/kernel/core_pattern", link))
	race(t, null, link, func() bool {
		out, refusal := tryRun(t, pod, dev, masked)
		if refusal == nil {
			harness.Equal(t, "masked path", out, "character special file:1:3\n")
		}
		return refusal == nil
	})
}

// A volume at /dev contains a link named console. The terminal must not be mounted on the link's
// target, and the target must not be created.
func TestCVE_2025_52565_DevConsoleSwapped(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	dir := untouched(t)
	volume := machine.HostDir(t, "pts")
	harness.Must(t, unix.Mknod(filepath.Join(volume, "null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	terminals := filepath.Join(volume, "pts")
	harness.Must(t, unix.Mount("devpts", terminals, "devpts", 0, "newinstance,ptmxmode=0666"))
	t.Cleanup(func() { harness.Must(t, unix.Unmount(terminals, unix.MNT_DETACH)) })
	console := filepath.Join(volume, "console")
	options := []harness.ContainerOption{harness.Mount(&runtimeapi.Mount{ContainerPath: "/dev", HostPath: volume}),
		func(c *runtimeapi.ContainerConfig) { c.Tty = true }, harness.Script("stat -c %F:%t /dev/console")}
	for _, target := range []string{canary(t), dir + "/made", "/proc/self/environ", "/proc/sys/kernel/core_pattern", "/etc/passwd"} {
		harness.Must(t, os.Symlink(target, console))
		_, refusal := tryRun(t, pod, options...)
		wantRefusal(t, refusal, "/dev/console mount target")
		harness.Must(t, os.Remove(console))
	}
	out, refusal := tryRun(t, pod, options...)
	harness.Must(t, refusal)
	harness.Equal(t, "console without a link", out, "character special file:88\r\n")
}

// A mount in the container must not redirect the runtime's writes below /proc/self/attr and
// /proc/sys (CVE-2025-52881). Here the container has a volume in place of procfs.
func TestCVE_2025_52881_ProcReplacedByAVolume(t *testing.T) {
	d := harness.StartDaemon(t)
	volume := t.TempDir()
	for _, dir := range []string{"self/attr", "thread-self/attr", "sys/net/ipv4", "sys/kernel"} {
		harness.Must(t, os.MkdirAll(filepath.Join(volume, dir), 0o755))
	}
	trap := filepath.Join(volume, "sys/net/ipv4/ping_group_range")
	harness.Must(t, os.WriteFile(trap, []byte("untouched"), 0o666))
	pod := d.RunPod(t, harness.Sysctl("net.ipv4.ping_group_range", "0 1"))
	_, refusal := tryRun(t, pod, harness.Mount(&runtimeapi.Mount{ContainerPath: "/proc", HostPath: volume}), harness.Script("true"))
	wantRefusal(t, refusal, "/proc mount")
	harness.Equal(t, "content of the volume's file", strings.Join(machine.ReadLines(trap), ""), "untouched")
}

// Annotations have no effect. This holds for systemd properties (CVE-2024-3154), for CDI
// (CVE-2026-53492) and for the annotations of other runtimes.
func TestCVE_2024_3154_SystemdPropertyInAnnotation(t *testing.T) {
	host := canary(t)
	checkAnnotationsHaveNoEffect(t, map[string]string{
		"org.systemd.property.ExecStartPost": `["/bin/rm", "` + host + `"]`,
		"org.systemd.property.MemoryMax":     "1",
	})
}

func TestCVE_2026_53492_CDIAnnotation(t *testing.T) {
	checkAnnotationsHaveNoEffect(t, map[string]string{
		"cdi.k8s.io/anything":                      "vendor.com/device=null",
		"io.kubernetes.cri-o.Devices":              "/dev/null:/dev/stolen:rwm",
		"devices.nri.io/container.c1":              "- path: /dev/stolen",
		"io.kubernetes.cri.container-type":         "sandbox",
		"org.criu.config":                          "/etc/passwd",
		"run.oci.keep_original_groups":             "1",
		"blockio.resources.beta.kubernetes.io/pod": "high",
	})
}

func checkAnnotationsHaveNoEffect(t *testing.T, annotations map[string]string) {
	t.Helper()
	cdi := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(cdi, "vendor.json"), []byte(`{"cdiVersion": "0.6.0", "kind": "vendor.com/device",
		"devices": [{"name": "null", "containerEdits": {"env": ["STOLEN=1"], "deviceNodes": [{"path": "/dev/stolen", "hostPath": "/dev/null"}]}}]}`), 0o644))
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("devices.cdi_spec_dirs = [%q]", cdi)))
	pod := d.RunPod(t, harness.HostNetwork, func(c *runtimeapi.PodSandboxConfig) { c.Annotations = annotations })
	c := pod.Run(t, func(c *runtimeapi.ContainerConfig) { c.Annotations = annotations })
	var detail struct {
		RuntimeSpec struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"runtimeSpec"`
	}
	harness.Must(t, json.Unmarshal([]byte(harness.Get(d.Cri.ContainerStatus(t.Context(), c.Id, true))(t).Info["info"]), &detail))
	harness.Equal(t, "annotations of the runtime spec", len(detail.RuntimeSpec.Annotations), 0)
	harness.Equal(t, "device from the annotation", c.Exec(t, "sh", "-c", "ls /dev/stolen 2>/dev/null; echo $STOLEN"), "")
}

// A value with a newline could set a second sysctl of the node. A plus sign could do the same,
// because CRI-O's tool read it as a separator.
func TestCVE_2022_0811_SysctlValue(t *testing.T) {
	d := harness.StartDaemon(t)
	before := machine.ReadLines("/proc/sys/kernel/core_pattern")
	for _, value := range []string{"1+kernel.core_pattern=|/evil", "1\nkernel.core_pattern=|/evil", "1\x00", "1;kernel.core_pattern=|/evil"} {
		config := d.PodConfig(t, harness.Sysctl("kernel.shm_rmid_forced", value))
		_, err := d.Cri.RunPodSandbox(t.Context(), config, "")
		harness.WantCode(t, err, codes.InvalidArgument, "kernel.shm_rmid_forced")
	}
	harness.Equal(t, "the node's core pattern", strings.Join(machine.ReadLines("/proc/sys/kernel/core_pattern"), "\n"), strings.Join(before, "\n"))
}

// A command with endless output must not fill the daemon's memory.
func TestCVE_2022_1708_EndlessExecOutput(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	stdout, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "dd if=/dev/zero bs=1M count=1024 2>/dev/null"}, 2*time.Minute)
	harness.Must(t, err)
	if len(stdout) > 16<<20 {
		t.Errorf("%d bytes of output", len(stdout))
	}
	tookLessThan(t, d, 256<<20)
}

// Inheritable capabilities would become effective in a program with file capabilities.
func TestCVE_2022_24769_InheritableCapabilities(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities.AddCapabilities = []string{"NET_ADMIN", "SYS_TIME"}
	}))
	for who, status := range map[string]string{
		"init": "cat /proc/1/status", "an exec": "cat /proc/self/status",
	} {
		if out := c.Exec(t, "sh", "-c", status+" | grep CapInh"); !strings.HasSuffix(out, "0000000000000000") {
			t.Errorf("%s has %s", who, out)
		}
	}
}

// The primary group must be among the supplementary groups. Otherwise a process can drop it by
// setgid, and with it a restriction of that group. The image's groups for the user must be there,
// too.
func TestCVE_2022_2995_PrimaryGroupIsSupplementaryToo(t *testing.T) { supplementaryGroups(t) }

func TestCVE_2023_25173_GroupsOfTheImage(t *testing.T) { supplementaryGroups(t) }

func supplementaryGroups(t *testing.T) {
	d := harness.StartDaemon(t)
	name := hostileImage(t, v1.Config{User: "app"}, fixture.Tree{
		fixture.File("etc/passwd", 0o644, "root:x:0:0::/:/bin/sh\napp:x:1000:1001::/:/bin/sh\n"),
		fixture.File("etc/group", 0o644, "root:x:0:\napp:x:1001:\nextra:x:1002:app\nother:x:1003:root\n")})
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Image(name))
	for _, groups := range []string{machine.StatusField(t, c.Pid(t), "Groups"), strings.TrimPrefix(c.Exec(t, "grep", "Groups", "/proc/self/status"), "Groups:")} {
		harness.Equal(t, "groups", strings.Join(strings.Fields(groups), " "), "1001 1002")
	}
}

// Abstract sockets belong to the network namespace, so a pod on the node's network could connect to
// them.
func TestCVE_2020_15257_SocketsOfTheRuntime(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	other := pod.Run(t)
	other.Exec(t, "true")
	for line := range strings.Lines(pod.Sh(t, "cat /proc/net/unix")) {
		fields := strings.Fields(line)
		if len(fields) != 8 || !strings.HasPrefix(fields[7], "@") {
			continue
		}
		// A socket that neither listens nor takes datagrams is harmless: no process can connect to
		// it. Clients of D-Bus, such as systemd, have such sockets.
		const listens, datagram = "00010000", "0002"
		if fields[3] == listens || fields[4] == datagram {
			t.Errorf("an abstract socket can be reached from the pod: %s", fields[7])
		}
	}
}

// The state directories contain files that other users must not read or execute.
func TestCVE_2024_25621_StateIsPrivate(t *testing.T) {
	d := harness.StartDaemon(t)
	d.RunPod(t).Run(t)
	for _, dir := range []string{d.Root, d.State, filepath.Dir(d.Socket)} {
		for _, path := range []string{dir, d.Socket} {
			as := exec.Command("ls", path+"/")
			as.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			if out, err := as.CombinedOutput(); err == nil {
				t.Errorf("another user can read or execute %s:\n%s", path, out)
			}
		}
	}
	info := harness.Get(os.Stat(d.Socket))(t)
	harness.Equal(t, "mode of the socket", info.Mode().Perm(), os.FileMode(0o600))
}

// A neighbour pod's router advertisement must not change the pod's routes. lo is left out because
// it has no neighbours.
func TestCVE_2020_10749_RouterAdvertisement(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	out := pod.Sh(t, "cd /proc/sys/net/ipv6/conf; for f in [!l]*/accept_ra; do [ $(cat $f) = 0 ] || echo $f; done")
	if out != "" {
		t.Errorf("router advertisements are accepted by\n%s", out)
	}
}

// In a pod on the node's network, a container's hosts, hostname and resolv.conf may be the node's
// files. No pod may relabel them. TestRelabelMounts (sandbox/selinux_test.go) shows on every
// machine that only requested relabels happen.
func TestCVE_2021_43816_RelabelOfDefaultFiles(t *testing.T) {
	if !selinux.GetEnabled() {
		t.Skip("NOT TESTED: this machine has no SELinux")
	}
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	files := map[string]string{"/etc/hosts": canary(t), "/etc/resolv.conf": canary(t), "/etc/hostname": canary(t), "/dev/shm": machine.HostDir(t)}
	watched := []string{"/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/dev/shm"}
	var mounts []harness.ContainerOption
	for inside, outside := range files {
		mounts = append(mounts, harness.Mount(&runtimeapi.Mount{ContainerPath: inside, HostPath: outside}))
		watched = append(watched, outside)
	}
	label := func(path string) string { return harness.Get(selinux.FileLabel(path))(t) }
	before := map[string]string{}
	for _, path := range watched {
		before[path] = label(path)
	}
	pod.Run(t, mounts...)
	pod.Run(t)
	for _, path := range watched {
		harness.Equal(t, "label of "+path, label(path), before[path])
	}
}

// A name becomes part of a path, and a name with ../ must not lead out of the intended directory.
// Every request refuses it and creates nothing at that place.
func TestPathInNames(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	name := strings.Repeat("../", 20) + untouched(t)[1:] + "/made"
	refused := func(what string, err error, codes ...codes.Code) {
		t.Helper()
		if !slices.Contains(codes, harness.CodeOf(err)) || err == nil {
			t.Errorf("%s: %v, want one of the codes %v", what, err, codes)
		}
	}
	for what, change := range map[string]harness.PodOption{
		"name":      func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = name },
		"uid":       func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Uid = name },
		"namespace": func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = name },
		"hostname":  func(c *runtimeapi.PodSandboxConfig) { c.Hostname = name },
		"sysctl":    harness.Sysctl("net."+name, "1"),
		"cgroup":    func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = "/" + harness.Machine + "/" + name },
	} {
		_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, change), "")
		refused("pod's "+what, err, codes.InvalidArgument)
	}
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t), name)
	refused("runtime handler", err, codes.NotFound, codes.InvalidArgument)

	pod := d.RunPod(t, harness.HostNetwork)
	create := func(what string, change harness.ContainerOption, codes ...codes.Code) {
		t.Helper()
		_, err := d.Cri.CreateContainer(t.Context(), pod.Id, pod.ContainerConfig(change), pod.Config)
		refused(what, err, codes...)
	}
	create("container's name", harness.ContainerNamed(name), codes.InvalidArgument)
	create("log path", func(c *runtimeapi.ContainerConfig) { c.LogPath = name }, codes.InvalidArgument)
	create("image", harness.Image(name), codes.InvalidArgument, codes.NotFound)
	create("CDI device", harness.Cdi(name), codes.InvalidArgument, codes.FailedPrecondition)
	create("CDI vendor", func(c *runtimeapi.ContainerConfig) {
		c.CDIDevices = []*runtimeapi.CDIDevice{{Name: name + "/dev=x"}}
	}, codes.InvalidArgument)
	create("seccomp profile", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: name}
	}), codes.InvalidArgument)
	create("file of the cgroup", harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.Unified = map[string]string{name: "1"} }),
		codes.InvalidArgument)
	_, err = d.TryPull(t, harness.Registry.Host+"/"+name, nil)
	refused("image to pull", err, codes.InvalidArgument)

	harness.Equal(t, "number of pods", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 1)
	harness.Equal(t, "number of containers", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 0)
}

// A container nests directories deeper than the daemon's descriptor limit. The daemon removes them
// and serves meanwhile.
func TestDeeplyNestedDirectories(t *testing.T) {
	const files, levels = 400, 3000
	d := harness.StartDaemon(t, harness.StartedBy("prlimit", fmt.Sprintf("--nofile=%d:%d", files, files)))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	// A path has at most 4096 bytes, so each branch is moved below the next.
	c.Exec(t, "sh", "-c", fmt.Sprintf(`mkdir /tree && cd /tree
		for branch in $(seq %d); do
			mkdir -p next/$(seq -s/ 100) && { [ ! -e done ] || mv done next/$(seq -s/ 100)/; } && mv next done || exit
		done`, levels/100))
	pod.Remove(t)
	trash := filepath.Join(d.Root, "rootfs", "trash")
	harness.Eventually(t, "it is deleted", func() error {
		left, err := os.ReadDir(trash)
		if err == nil && len(left) > 0 {
			err = harness.Unexpected("trash", left, "nothing")
		}
		return err
	})
	d.RunPod(t).Run(t)
}
