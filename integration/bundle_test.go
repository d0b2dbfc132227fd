package integration

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// bundle returns the files of a debug bundle by name.
func bundle(t *testing.T, d *harness.Daemon, args ...string) map[string]string {
	t.Helper()
	file := t.TempDir() + "/bundle.tar.gz"
	args = append([]string{"debug", "bundle", "--output", file, "--log", d.LogFile(),
		"--config", d.ConfigFile(), "--listen", d.Socket, "--root", d.Root, "--state", d.State}, args...)
	cmd := d.Command(args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("berth debug bundle: %v: %s", err, out)
	}
	info := harness.Get(os.Stat(file))(t)
	harness.Equal(t, "mode of the bundle", info.Mode().Perm(), 0o600)
	all := map[string]string{}
	archive := tar.NewReader(harness.Get(gzip.NewReader(bytes.NewReader(harness.Get(os.ReadFile(file))(t))))(t))
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		harness.Must(t, err)
		all[path.Base(header.Name)] = string(harness.Get(io.ReadAll(archive))(t))
	}
}

func TestDebugBundleHasNoSecrets(t *testing.T) {
	const secret = "hunter2-hunter2"
	d := harness.StartDaemon(t, harness.WithHosts("registry.example",
		"[host.\"https://registry.example\".header]\nX-Custom = [\""+secret+"\"]\n"))
	for _, name := range []string{"host.example/x:" + secret + "@" + secret, "https://u:" + secret + "@host.example/?sig=" + secret} {
		_, err := d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: name}, nil, nil)
		if err == nil {
			t.Error("pulled " + name)
		}
	}
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Env("PASSPHRASE", secret), harness.Script("echo "+secret+"; exec sleep 1000"))
	files := bundle(t, d)
	for name, want := range map[string]string{
		"SUMMARY.txt":    "goroutines.txt",
		"goroutines.txt": "berth/server.(*Server).Serve",
		"metrics.txt":    "berth_pods{state=\"ready\"} 1",
		"daemon.txt":     "VmRSS",
		"status.json":    `"goroutines"`,
		"pods.json":      c.Id,
		"traces.json":    "RunPodSandbox",
		"config.json":    d.Root,
		"registries.txt": "registry.example",
		"cni.txt":        "bridge",
		"check.json":     "kernel",
		"log.txt":        "pod ready",
		"versions.txt":   "go1.",
		"kernel.txt":     "MemTotal",
		"mounts.txt":     d.State,
		"disks.txt":      "MiB available",
		"cgroups.txt":    ":",
		"processes.txt":  "(berthd)",
	} {
		harness.WantText(t, name, files[name], want)
	}
	if profile := files["heap.pb.gz"]; len(profile) == 0 {
		t.Error("the bundle has no memory profile")
	}
	for name, content := range files {
		harness.WantNoText(t, name, content, secret)
	}
}

func TestDebugBundleOfHangingDaemon(t *testing.T) {
	d := harness.StartDaemon(t)
	harness.Must(t, d.Cmd.Process.Signal(syscall.SIGSTOP))
	began := time.Now()
	files := bundle(t, d, "--limit", "2s")
	harness.Must(t, d.Cmd.Process.Signal(syscall.SIGCONT))
	if took := time.Since(began); took > 45*time.Second {
		t.Errorf("the bundle took %v", took)
	}
	harness.WantText(t, "summary", files["SUMMARY.txt"], "deadline exceeded")
	harness.WantText(t, "daemon", files["daemon.txt"], "T (stopped)")
	harness.WantText(t, "log", files["log.txt"], "serving")
	harness.WantText(t, "kernel", files["kernel.txt"], "MemTotal")
	harness.WantText(t, "processes", files["processes.txt"], "(berthd) T")
}

func TestDebugBundleWithoutDaemon(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Stop(t)
	files := bundle(t, d, "--limit", "10s")
	harness.WantText(t, "summary", files["SUMMARY.txt"], "no runtime listens")
	harness.WantText(t, "log", files["log.txt"], "stopping")
	d.Start(t)
}
