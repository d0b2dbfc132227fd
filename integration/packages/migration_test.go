package packages

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/pages"
)

// containerdEnv names the directory of containerd and runc, see integration/containerd/build.
const containerdEnv = "BERTH_CONTAINERD"

// A node with containerd and a static pod moves to berth and back, with the commands of
// docs/migration.md and systemd's units. It has no control plane, so the lines with kubectl are
// left out; TestControlPlaneMigration runs them.
func TestMigrationInGuest(t *testing.T) {
	if os.Getenv(containerdEnv) == "" || os.Getenv(pagesEnv) == "" {
		t.Skip(containerdEnv + " or " + pagesEnv + " is not set: run contrib/guest -packages systemd")
	}
	addAddress(t)
	completeCPUInfo(t)
	harness.Must(t, os.RemoveAll(manifests)) // those of another test
	startContainerd(t)
	install(t, "old")
	t.Cleanup(func() { run(t, "apt-get", "purge", "--yes", "berth") })
	harness.Equal(t, "unit file beside containerd", property(t, "berth.service", "UnitFileState"), "disabled")
	write(t, "/var/lib/kubelet/config.yaml", strings.Replace(kubeletConfig, "/run/berth/berth.sock", "/run/containerd/containerd.sock", 1))
	startKubeletWith(t, "/var/lib/kubelet/config.yaml")
	write(t, filepath.Join(manifests, "moved.yaml"), fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: moved, namespace: default}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: %s, command: [sleep, "100000"]}
`, harness.BaseImage))
	t.Cleanup(func() { run(t, "systemctl", "stop", "kubelet") })
	t.Cleanup(func() { harness.Must(t, os.Remove(filepath.Join(manifests, "moved.yaml"))) })
	awaitRuntime(t, "containerd")
	for _, b := range harness.Get(pages.Read(os.Getenv(pagesEnv)))(t)["migration.md"] {
		if !b.RunsIn(pages.Migration) {
			continue
		}
		if b.Heading == "Check" {
			awaitRuntime(t, "berth")
		}
		b.Text = withoutKubectl(b.Text)
		out, err := b.Run(t.Context(), t.TempDir(), "PATH="+os.Getenv(containerdEnv)+":"+os.Getenv("PATH"))
		if err != nil {
			t.Fatal(err) // the next blocks depend on it
		}
		t.Logf("%s:\n%s", b.Name(), out)
	}
	awaitRuntime(t, "containerd")
}

// withoutKubectl returns a script without the lines that need an API server.
func withoutKubectl(script string) string {
	kept := ""
	for line := range strings.Lines(script) {
		if !strings.Contains(line, "kubectl ") {
			kept += line
		}
	}
	return kept
}

// startContainerd starts containerd in a unit, with its usual directories.
func startContainerd(t *testing.T) {
	t.Helper()
	bin := os.Getenv(containerdEnv)
	pause := harness.Get(fixture.Image(v1.Config{Cmd: []string{"sleep", "100000"}}))(t)
	write(t, "/etc/containerd/config.toml", fmt.Sprintf(`version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %q
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = %q
SystemdCgroup = true
`, harness.Get(harness.Registry.Push("pause:latest", pause))(t), filepath.Join(bin, "runc")))
	write(t, "/etc/systemd/system/containerd.service", `[Unit]
Description=containerd
[Service]
Type=notify
Environment=PATH=`+bin+`:/usr/sbin:/usr/bin:/sbin:/bin
ExecStart=`+filepath.Join(bin, "containerd")+`
Delegate=yes
KillMode=process
[Install]
WantedBy=multi-user.target
`)
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "enable", "--now", "containerd")
	t.Cleanup(func() { run(t, "systemctl", "disable", "--now", "containerd") })
}

// awaitRuntime waits until the pod runs on a runtime.
func awaitRuntime(t *testing.T, runtime string) {
	t.Helper()
	eventually(t, "the pod runs on "+runtime, func() error {
		pod, err := findPod("moved")
		if err != nil {
			return err
		}
		for _, s := range pod.Status.ContainerStatuses {
			if s.State.Running != nil && strings.HasPrefix(s.ContainerID, runtime+"://") {
				return nil
			}
		}
		return fmt.Errorf("its status is %+v", pod.Status)
	})
}
