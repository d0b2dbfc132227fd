package packages

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
)

// handInstalled is the directory of programs that were installed without a package.
const handInstalled = "/usr/local/bin"

// An upgrade from release 0.2, which had one program and no package: its unit runs "berth serve".
// The operator first replaces the programs, and later installs the package. A pod of the release
// runs all the time.
func TestUpgradeFromOneProgram(t *testing.T) {
	if os.Getenv(packagesEnv) == "" {
		t.Skip(packagesEnv + " is not set: run contrib/guest -packages systemd")
	}
	release := filepath.Join(os.Getenv(packagesEnv), "release")
	if !exists(t, release) {
		t.Skip("NOT TESTED: this checkout has no history to build release 0.2 from")
	}
	before := inventory(t)
	installPrograms(t, release, "berth", "berth-shim")
	const unit = "/etc/systemd/system/berth.service"
	run(t, "install", "-m", "644", filepath.Join(release, "berth.service"), unit)
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "start", "berth")
	runsProgram(t, filepath.Join(handInstalled, "berth"))
	pod := startSleeper(t)

	installPrograms(t, harness.BinDir, "berth", "berthd", "berth-shim", "berth-unpack", "berth-verify", "berth-task", "berth-stream")
	run(t, "systemctl", "restart", "berth")
	runsProgram(t, filepath.Join(handInstalled, "berthd"))
	pod.lives(t)

	for _, path := range append(harness.Get(filepath.Glob(handInstalled+"/berth*"))(t), unit) {
		harness.Must(t, os.Remove(path))
	}
	install(t, "old")
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "restart", "berth")
	runsInstalled(t)
	pod.lives(t)

	run(t, "apt-get", "purge", "--yes", "berth")
	harness.Equal(t, "processes of the pod", len(sleepers(t)), 0)
	unchanged(t, before)
}

// installPrograms installs programs as docs/install.md says.
func installPrograms(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		run(t, "install", filepath.Join(dir, name), handInstalled)
	}
}

// sleeper is the process of a pod's only container.
type sleeper struct{ pid string }

const sleepTime = "98765" // seconds, which no other process sleeps

func startSleeper(t *testing.T) sleeper {
	t.Helper()
	const file = "/run/tmp/sleeper.yaml"
	write(t, file, fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: sleeper}
spec:
  restartPolicy: Never
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: %q, command: [sleep, %q]}
`, harness.BaseImage, sleepTime))
	run(t, "berth", "run", "--detach", "--run-dir", "/run/tmp/sleeper", file)
	var pids []string
	harness.Eventually(t, "the release's container executes its command", func() error {
		if pids = sleepers(t); len(pids) != 1 {
			return fmt.Errorf("processes of the pod: %v", pids)
		}
		return nil
	})
	return sleeper{pids[0]}
}

// sleepers returns the processes that sleep for sleepTime.
func sleepers(t *testing.T) (pids []string) {
	t.Helper()
	for _, path := range harness.Get(filepath.Glob("/proc/[0-9]*/cmdline"))(t) {
		if args, err := os.ReadFile(path); err == nil && string(args) == "sleep\x00"+sleepTime+"\x00" {
			pids = append(pids, filepath.Base(filepath.Dir(path)))
		}
	}
	return pids
}

// lives checks that the process still runs, and that the daemon serves its container.
func (s sleeper) lives(t *testing.T) {
	t.Helper()
	harness.Equal(t, "processes of the pod", strings.Join(sleepers(t), " "), s.pid)
	harness.Equal(t, "output of an exec", run(t, "berth", "exec", "sleeper/main", "echo", "here"), "here")
	if out := run(t, "berth", "check", "--state"); !strings.Contains(out, ": 0 differences") {
		t.Error(out)
	}
}
