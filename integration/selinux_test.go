package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/selinux/go-selinux"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// Types of Debian's policy and of container-selinux.
const (
	containerType  = "container_t"
	privilegedType = "spc_t"
	volumeType     = "container_file_t"
)

// podLevel requests an SELinux level for a pod and, as kubelet does, its containers.
func podLevel(level string) harness.PodOption {
	return harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
		s.SelinuxOptions = &runtimeapi.SELinuxOption{Level: level}
	})
}

// seLinux requests SELinux options for a container.
func seLinux(o *runtimeapi.SELinuxOption) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.SelinuxOptions = o })
}

// labelOf returns type and level of a process.
func labelOf(t *testing.T, pid int) (kind, level string) {
	t.Helper()
	context := harness.Get(selinux.NewContext(machine.Confinement(t, pid)))(t)
	return context["type"], context["level"]
}

// A container's label is that of its pod, or the requested one. Execs have it too. Privileged
// containers leave the confined type.
func TestSELinuxLabels(t *testing.T) {
	machine.NeedSELinux(t)
	d := harness.StartDaemon(t)
	const level = "s0:c100,c200"
	pod := d.RunPod(t, podLevel(level), privilegedPod)
	for _, tt := range []struct {
		name        string
		options     []harness.ContainerOption
		kind, level string
	}{
		{"no options", nil, containerType, level},
		{"level", []harness.ContainerOption{seLinux(&runtimeapi.SELinuxOption{Level: "s0:c1,c2"})}, containerType, "s0:c1,c2"},
		{"type", []harness.ContainerOption{seLinux(&runtimeapi.SELinuxOption{Type: privilegedType})}, privilegedType, level},
		{"privileged", []harness.ContainerOption{harness.Security(harness.Privileged)}, privilegedType, "s0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := pod.Run(t, tt.options...)
			kind, got := labelOf(t, c.Pid(t))
			harness.Equal(t, "type of the command", kind, tt.kind)
			harness.Equal(t, "level of the command", got, tt.level)
			harness.Equal(t, "label of an exec", strings.Trim(c.Exec(t, "cat", "/proc/self/attr/current"), "\n\x00"), machine.Confinement(t, c.Pid(t)))
			harness.Equal(t, "label of the monitor", machine.Confinement(t, harness.MonitorOf(t, d, c)), machine.Confinement(t, d.Cmd.Process.Pid))
			harness.Equal(t, "text of a file", c.Exec(t, "sh", "-c", "echo text >/file; cat /file"), "text")
		})
	}
	kind, got := labelOf(t, d.RunPod(t, podLevel(level)).PausePID(t))
	harness.Equal(t, "type of pause", kind, containerType)
	harness.Equal(t, "level of pause", got, level)
}

// Pods without options have different categories, which a new daemon does not give to another pod.
func TestSELinuxDrawsCategories(t *testing.T) {
	machine.NeedSELinux(t)
	d := harness.StartDaemon(t)
	levels := map[string]bool{}
	for i := range 3 {
		pod := d.RunPod(t)
		first, second := pod.Run(t), pod.Run(t)
		_, level := labelOf(t, first.Pid(t))
		harness.Equal(t, "level of the second container", harness.Get(selinux.NewContext(machine.Confinement(t, second.Pid(t))))(t)["level"], level)
		if levels[level] || !strings.Contains(level, ":c") {
			t.Errorf("pod %d has the level %s; others have %v", i, level, levels)
		}
		levels[level] = true
		d.Restart(t)
	}
}

// A volume that berth relabels for a pod, with a requested or a drawn level, is not readable for pods
// with other categories. A volume without the type of containers' files is readable for nobody, and
// the kernel reports this.
func TestSELinuxVolumes(t *testing.T) {
	machine.NeedSELinux(t)
	for _, tt := range []struct {
		name    string
		options []harness.PodOption
	}{{"requested level", []harness.PodOption{podLevel("s0:c1,c2")}}, {"drawn level", nil}} {
		t.Run(tt.name, func(t *testing.T) {
			d := harness.StartDaemon(t)
			// The denials that this test expects.
			d.Tolerate(`comm="cat" name="file"`)
			d.Tolerate(`comm="sh" path="/v`)
			owner, stranger := d.RunPod(t, tt.options...), d.RunPod(t, podLevel("s0:c3,c4"))
			_, level := labelOf(t, owner.PausePID(t))
			label := "system_u:object_r:" + volumeType + ":" + level
			volume := filepath.Join(machine.HostDir(t, "volume"), "volume")
			harness.Must(t, os.Mkdir(filepath.Join(volume, "dir"), 0o755))
			for _, file := range []string{"file", "dir/file"} {
				harness.Must(t, os.WriteFile(filepath.Join(volume, file), []byte("text\n"), 0o644)) //nolint:gosec // containers read it
			}
			harness.Must(t, os.Symlink("/etc/shadow", filepath.Join(volume, "link")))
			shadow := harness.Get(selinux.FileLabel("/etc/shadow"))(t)
			harness.Must(t, selinux.Chcon(volume, "system_u:object_r:var_t:s0", true))
			denials := machine.WatchDenials(t)
			mount := func(relabel bool) harness.ContainerOption {
				return harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/v", SelinuxRelabel: relabel})
			}
			readable := func(p *harness.Pod, relabel bool) bool {
				c := p.Run(t, mount(relabel))
				_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"cat", "/v/file", "/v/dir/file"}, 0)
				return err == nil
			}
			harness.Equal(t, "a volume of the host is readable", readable(owner, false), false)
			harness.Equal(t, "a relabelled volume is readable", readable(owner, true), true)
			for _, path := range []string{volume, volume + "/dir", volume + "/dir/file"} {
				harness.Equal(t, "label of "+path, harness.Get(selinux.FileLabel(path))(t), label)
			}
			harness.Equal(t, "label of a symlink's target", harness.Get(selinux.FileLabel("/etc/shadow"))(t), shadow)
			harness.Equal(t, "another pod's volume is readable", readable(stranger, false), false)
			harness.Equal(t, "the owner's volume is still readable", readable(owner, false), true)
			owner.Run(t, mount(false)).Exec(t, "sh", "-c", "echo more >>/v/file; mkdir /v/new; touch /v/new/file")
			harness.Equal(t, "label of a new file", harness.Get(selinux.FileLabel(volume+"/new/file"))(t), label)
			// The policy hides the denials for a directory with other categories.
			harness.WantText(t, "denials", strings.Join(denials(), "\n"), "tcontext=system_u:object_r:var_t:s0 tclass=file")
		})
	}
}

// kubelet mounts some volumes with the option context. Their label is that of the mount, and berth
// neither relabels them nor fails if it is asked to.
func TestSELinuxVolumeWithContextOption(t *testing.T) {
	machine.NeedSELinux(t)
	d := harness.StartDaemon(t)
	d.Tolerate(`comm="touch" name="/"`)
	volume := machine.HostDir(t)
	const level = "s0:c5,c6"
	harness.Must(t, syscall.Mount("volume", volume, "tmpfs", 0, fmt.Sprintf("context=%q", "system_u:object_r:"+volumeType+":"+level)))
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(volume, 0)) })
	owner, stranger := d.RunPod(t, podLevel(level)), d.RunPod(t, podLevel("s0:c7,c8"))
	for _, relabel := range []bool{false, true} {
		mount := harness.Mount(&runtimeapi.Mount{HostPath: volume, ContainerPath: "/v", SelinuxRelabel: relabel})
		owner.Run(t, mount).Exec(t, "touch", "/v/file")
		_, _, err := d.Cri.ExecSync(t.Context(), stranger.Run(t, mount).Id, []string{"touch", "/v/stranger"}, 0)
		harness.Equal(t, fmt.Sprintf("another pod writes with relabel %v", relabel), err == nil, false)
	}
}

// What berth and kubelet mount into containers is usable: the root filesystem, /dev, /dev/shm,
// network files, the termination log, image volumes and volumes of images.
func TestSELinuxFilesOfContainers(t *testing.T) {
	machine.NeedSELinux(t)
	d := harness.StartDaemon(t)
	config := v1.Config{Cmd: []string{"sh"}, Volumes: map[string]struct{}{"/data": {}}}
	image, _ := harness.Push(t, harness.Registry, "volumes:latest", harness.BuildImage(t, config))
	data, _ := harness.Push(t, harness.Registry, "data:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("data", 0o644, "data\n")}))
	for _, namespaces := range []struct {
		name   string
		option harness.PodOption
	}{
		{"own", func(*runtimeapi.PodSandboxConfig) {}}, {"network", harness.HostNetwork}, {"PID", harness.HostPID}, {"IPC", harness.HostIPC}, {"shared PID", harness.SharedPID},
	} {
		t.Run(namespaces.name, func(t *testing.T) {
			pod := d.RunPod(t, namespaces.option)
			files := machine.HostDir(t)
			hosts, log := filepath.Join(files, "hosts"), filepath.Join(files, "log")
			harness.Must(t, os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"), 0o644)) //nolint:gosec // containers read it
			harness.Must(t, os.WriteFile(log, nil, 0o666))                               //nolint:gosec // containers write it
			d.Pull(t, data)
			c := pod.Run(t, harness.Image(image),
				harness.Mount(&runtimeapi.Mount{HostPath: hosts, ContainerPath: "/etc/hosts", SelinuxRelabel: true}),
				harness.Mount(&runtimeapi.Mount{HostPath: log, ContainerPath: "/dev/termination-log", SelinuxRelabel: true}),
				harness.Mount(&runtimeapi.Mount{Image: &runtimeapi.ImageSpec{Image: data}, ContainerPath: "/image", Readonly: true}))
			kind, _ := labelOf(t, c.Pid(t))
			harness.Equal(t, "type", kind, containerType)
			c.Exec(t, "sh", "-ec", `
				cat /etc/hosts /etc/hostname /etc/resolv.conf /image/data /proc/self/mountinfo >/dev/null
				echo end >/dev/termination-log
				for dir in /dev /data /tmp /root; do mkdir -p $dir; echo text >$dir/file; cat $dir/file >/dev/null; rm $dir/file; done
				head -c 8 /dev/urandom >/dev/null
				cp /bin/busybox /root/true && /root/true`)
			harness.Equal(t, "termination log", strings.Join(machine.ReadLines(log), ""), "end")
			if namespaces.name != "IPC" {
				c.Exec(t, "sh", "-ec", "echo text >/dev/shm/file; cat /dev/shm/file; rm /dev/shm/file")
			}
		})
	}
}

// Debian's policy does not let CRIU save a container. The container goes on with its label.
func TestSELinuxCheckpoint(t *testing.T) {
	machine.NeedSELinux(t)
	d := harness.StartDaemon(t, harness.WithCRIU(t))
	d.Tolerate(`comm="ld-linux-x86-64"`) // which runs CRIU
	pod := d.RunPod(t)
	c := pod.Run(t)
	before := machine.Confinement(t, c.Pid(t))
	location := filepath.Join(d.Root, "checkpoint.tar")
	_, err := harness.RawRuntime(t, d).CheckpointContainer(t.Context(),
		&runtimeapi.CheckpointContainerRequest{ContainerId: c.Id, Location: location})
	harness.WantCode(t, err, codes.FailedPrecondition, "CRIU failed", "Permission denied")
	harness.Equal(t, "label", machine.Confinement(t, c.Pid(t)), before)
	harness.Equal(t, "text of a file", c.Exec(t, "sh", "-c", "echo text >/file; cat /file"), "text")
}

// CRIU restores nothing on a node with SELinux, whatever the configuration says.
func TestSELinuxRestoreIsRefused(t *testing.T) {
	machine.NeedSELinux(t)
	d := harness.StartDaemon(t, harness.WithConfig(harness.TrustedRestores))
	container := d.RunPod(t).ContainerConfig()
	_, err := harness.RawRuntime(t, d).RestorePod(t.Context(), &runtimeapi.RestorePodRequest{
		CheckpointPath: d.Dir, Config: d.PodConfig(t), ContainerConfigs: []*runtimeapi.ContainerConfig{container}})
	harness.WantCode(t, err, codes.FailedPrecondition, "this node has SELinux")
}
