package upgrade

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// features are pods and containers with features that 0.1.0 did not have.
type features struct {
	mapped, ported *harness.Pod
	inMapped       *harness.Container // in a user namespace
	volume         *harness.Container // with an image as volume
	device         *harness.Container // with a CDI device
	resized        *harness.Container // limits changed while running
}

// hasFeatures reports whether a released version has these features.
func hasFeatures(version string) bool { return version != "0.1.0" }

const (
	hostPort    = 18099
	firstHostID = 7 << 16 // of the user namespace, with kubelet's number of IDs
	memoryLimit = 48 << 20
)

// configure writes a CDI spec and returns the configuration for the features in a released version.
// The current daemon needs no configuration, because the container's record contains the devices.
func configure(t *testing.T, version string) []string {
	t.Helper()
	if !hasFeatures(version) {
		return nil
	}
	dir := t.TempDir()
	harness.Must(t, os.WriteFile(filepath.Join(dir, "vendor.json"), []byte(`{"cdiVersion": "0.6.0", "kind": "vendor.example/dev",
		"devices": [{"name": "null", "containerEdits": {"env": ["FROM_CDI=yes"], "deviceNodes": [{"path": "/dev/from-cdi", "hostPath": "/dev/null"}]}}]}`), 0o600))
	return []string{fmt.Sprintf("cdi_spec_dirs = [%q]", dir)}
}

// runFeatures creates the pods and containers. opts apply to all containers; volume is the ID of an
// image.
func runFeatures(t *testing.T, d *harness.Daemon, volume string, opts ...harness.ContainerOption) *features {
	t.Helper()
	mapping := []*runtimeapi.IDMapping{{HostId: firstHostID, Length: 1 << 16}}
	users := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mapping, Gids: mapping}
	with := func(more ...harness.ContainerOption) []harness.ContainerOption {
		return append(append([]harness.ContainerOption(nil), opts...), more...)
	}
	f := &features{
		mapped: d.RunPod(t, harness.PodNamed("mapped"), func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users
		}),
		ported: d.RunPod(t, harness.PodNamed("ported"), harness.HostPort(hostPort, 80, runtimeapi.Protocol_TCP)),
	}
	f.inMapped = f.mapped.Run(t, with(harness.ContainerNamed("mapped"), harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.UsernsOptions = users
	}))...)
	f.volume = f.ported.Run(t, with(harness.ContainerNamed("volume"), harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", Readonly: true, Image: &runtimeapi.ImageSpec{Image: volume}}))...)
	f.device = f.ported.Run(t, with(harness.ContainerNamed("device"), func(c *runtimeapi.ContainerConfig) {
		c.CDIDevices = []*runtimeapi.CDIDevice{{Name: "vendor.example/dev=null"}}
	})...)
	f.resized = f.ported.Run(t, with(harness.ContainerNamed("resized"))...)
	harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), f.resized.Id, &runtimeapi.ContainerResources{
		Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memoryLimit}}))
	return f
}

// checkAll checks that all features work with a newer daemon. The containers run busybox.
func (f *features) checkAll(t *testing.T) {
	t.Helper()
	harness.Equal(t, "user namespace of an exec", f.inMapped.Exec(t, "awk", "{print $2}", "/proc/self/uid_map"), fmt.Sprint(firstHostID))
	harness.Equal(t, "a new container in the user namespace", f.mapped.Sh(t, "awk '{print $2}' /proc/self/uid_map", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.UsernsOptions = f.mapped.Config.Linux.SecurityContext.NamespaceOptions.UsernsOptions
	})), fmt.Sprintln(firstHostID))
	harness.Equal(t, "a file of the image volume", f.volume.Exec(t, "cat", "/v/etc/passwd"), f.volume.Exec(t, "cat", "/etc/passwd"))
	harness.Equal(t, "environment and device from CDI", f.device.Exec(t, "sh", "-c", "echo $FROM_CDI; stat -c %t:%T /dev/from-cdi"), "yes\n1:3")
	harness.Equal(t, "the limit that was changed", f.resized.Status(t).Resources.GetLinux().GetMemoryLimitInBytes(), memoryLimit)
	f.serves(t)
	for _, c := range []*harness.Container{f.inMapped, f.volume, f.device, f.resized} {
		c.Stop(t, 0)
		harness.Equal(t, "exit code", c.Status(t).ExitCode, 137)
	}
	f.mapped.Remove(t)
	f.ported.Remove(t)
}

// serves requests a page of the pod's container through its host port.
func (f *features) serves(t *testing.T) {
	t.Helper()
	f.ported.Run(t, harness.Script("while :; do echo through | nc -l -p 80; done"))
	harness.Eventually(t, "the host port reaches the pod", func() error {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort("127.0.0.1", fmt.Sprint(hostPort)), time.Second)
		if err != nil {
			return err
		}
		defer conn.Close()
		answer := make([]byte, 7)
		if _, err := conn.Read(answer); err != nil {
			return err
		}
		if string(answer) != "through" {
			return harness.Unexpected("the answer", string(answer), "through")
		}
		return nil
	})
}
