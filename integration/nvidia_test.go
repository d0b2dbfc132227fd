package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// nvidiaLibrary is the driver library that containers get, as a path in a container.
const nvidiaLibrary = "/usr/lib/nvidia/libcuda.so.1.1"

// nvidiaPrograms returns the directory with programs of NVIDIA's container toolkit: $BERTH_NVIDIA.
func nvidiaPrograms(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("BERTH_NVIDIA")
	if dir == "" {
		t.Skip("NOT TESTED: BERTH_NVIDIA is not set (integration/nvidia/build)")
	}
	return dir
}

// nvidiaSpec makes a driver's directory with the device nodes nvidia0 and nvidiactl, which are null
// and full, and a library. `nvidia-ctk cdi generate` writes a CDI spec for them, without a GPU: its
// mode csv reads lists of files, as on Tegra systems. nvidiaSpec returns the spec's directory.
func nvidiaSpec(t *testing.T, programs string) string {
	t.Helper()
	driver := machine.HostDir(t, "dev", filepath.Dir(nvidiaLibrary))
	harness.Must(t, unix.Mknod(driver+"/dev/nvidia0", unix.S_IFCHR|0o666, nullDevice))
	harness.Must(t, unix.Mknod(driver+"/dev/nvidiactl", unix.S_IFCHR|0o666, fullDevice))
	harness.Must(t, os.WriteFile(driver+nvidiaLibrary, []byte("library\n"), 0o600))
	harness.Must(t, os.Symlink("libcuda.so.1.1", driver+"/usr/lib/nvidia/libcuda.so.1"))
	list := filepath.Join(t.TempDir(), "files.csv")
	harness.Must(t, os.WriteFile(list, []byte("dev, /dev/nvidia0\ndev, /dev/nvidiactl\nlib, "+nvidiaLibrary+"\nsym, /usr/lib/nvidia/libcuda.so.1\n"), 0o600))
	specs := t.TempDir()
	generate := exec.Command(programs+"/nvidia-ctk", "cdi", "generate", "--mode=csv", "--csv.file="+list, "--driver-root="+driver, "--dev-root="+driver,
		"--nvidia-cdi-hook-path="+programs+"/nvidia-cdi-hook", "--ldconfig-path=/sbin/ldconfig", "--output="+specs+"/nvidia.yaml")
	generate.Env = []string{"PATH=" + os.Getenv("PATH"), "NVIDIA_CTK_CONFIG_FILE_PATH=" + filepath.Join(specs, "none")}
	if out, err := generate.CombinedOutput(); err != nil {
		t.Fatalf("nvidia-ctk cdi generate: %v\n%s", err, out)
	}
	return specs
}

// nvidiaHandler returns an option for the handler nvidia: nvidia-container-runtime in CDI mode over
// crun. A script sets the path of its configuration, which is in /etc on a node.
func nvidiaHandler(t *testing.T, programs, specs string) harness.DaemonOption {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf("[nvidia-container-runtime]\nmode = \"cdi\"\nruntimes = [%q]\n[nvidia-container-runtime.modes.cdi]\nspec-dirs = [%q]\n", harness.Crun(t), specs)
	harness.Must(t, os.WriteFile(dir+"/config.toml", []byte(config), 0o600))
	script := fmt.Sprintf("#!/bin/sh\nNVIDIA_CTK_CONFIG_FILE_PATH=%s/config.toml exec %s/nvidia-container-runtime \"$@\"\n", dir, programs)
	harness.Must(t, os.WriteFile(dir+"/nvidia", []byte(script), 0o700))
	return harness.WithHandler("nvidia", dir+"/nvidia")
}

// nvidiaDevice requests a device as kubelet does for a device plugin or for DRA.
func nvidiaDevice(name string) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		c.CDIDevices = append(c.CDIDevices, &runtimeapi.CDIDevice{Name: "nvidia.com/gpu=" + name})
	}
}

// Device nodes, environment, libraries and the results of hooks arrive in a container, whoever
// applies NVIDIA's CDI spec: berth or nvidia-container-runtime.
func TestNvidia(t *testing.T) {
	programs := nvidiaPrograms(t)
	specs := nvidiaSpec(t, programs)
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("devices.cdi_spec_dirs = [%q]", specs)), nvidiaHandler(t, programs, specs))
	for _, test := range []struct {
		name, handler string
		request       harness.ContainerOption
	}{
		{"berth, built-in runtime", "", nvidiaDevice("0")},
		{"berth, nvidia-container-runtime", "nvidia", nvidiaDevice("0")},
		{"nvidia-container-runtime", "nvidia", harness.Env("NVIDIA_VISIBLE_DEVICES", "nvidia.com/gpu=0")},
		{"nvidia-container-runtime, all devices", "nvidia", harness.Env("NVIDIA_VISIBLE_DEVICES", "all")},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := runPodWith(t, d, test.handler, harness.HostNetwork)
			wantNvidiaDevice(t, pod.Run(t, test.request))
			harness.Equal(t, "devices of a container without a request", pod.Sh(t, "ls /dev | grep nvidia; cat "+nvidiaLibrary+" 2>/dev/null; true"), "")
			pod.Remove(t)
		})
	}
}

// wantNvidiaDevice checks what the spec of nvidiaSpec adds to a container.
func wantNvidiaDevice(t *testing.T, c *harness.Container) {
	t.Helper()
	harness.Equal(t, "nodes", c.Exec(t, "stat", "-c", "%n %t:%T", "/dev/nvidia0", "/dev/nvidiactl"), "/dev/nvidia0 1:3\n/dev/nvidiactl 1:7")
	c.Exec(t, "sh", "-c", "echo x >/dev/nvidia0 && head -c 1 /dev/nvidiactl") // the device cgroup allows both
	harness.Equal(t, "environment", c.Exec(t, "sh", "-c", "tr '\\0' '\\n' </proc/1/environ | grep ^NVIDIA_"), "NVIDIA_VISIBLE_DEVICES=void")
	harness.Equal(t, "library", c.Exec(t, "cat", nvidiaLibrary), "library")
	// The hooks create-symlinks and update-ldcache ran in the container's root.
	harness.Equal(t, "link of a hook", c.Exec(t, "readlink", "/usr/lib/nvidia/libcuda.so"), "libcuda.so.1")
	harness.WantText(t, "library paths of a hook", c.Exec(t, "sh", "-c", "cat /etc/ld.so.conf.d/*"), "/usr/lib/nvidia")
	c.Exec(t, "test", "-s", "/etc/ld.so.cache")
}

// What nvidia-container-runtime and the runtime below it report reaches kubelet and clients.
func TestNvidiaHandlerErrors(t *testing.T) {
	programs := nvidiaPrograms(t)
	d := harness.StartDaemon(t, nvidiaHandler(t, programs, nvidiaSpec(t, programs)), harness.WithHandler("crun", harness.Crun(t)))
	announced, _ := handlersOf(t, d)
	harness.Equal(t, "features", announced["nvidia"].String(), announced["crun"].String())
	pod := runPodWith(t, d, "nvidia", harness.HostNetwork)
	c := pod.Create(t, harness.Env("NVIDIA_VISIBLE_DEVICES", "nvidia.com/gpu=9"))
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), c.Id), codes.Internal, "nvidia.com/gpu=9")
	// An annotation requests no device, although nvidia-container-runtime reads it in CDI mode.
	out := pod.Sh(t, "ls /dev | grep nvidia; true", func(c *runtimeapi.ContainerConfig) { c.Annotations["cdi.k8s.io/gpu"] = "nvidia.com/gpu=0" })
	harness.Equal(t, "devices of a container with an annotation", strings.TrimSpace(out), "")
}
