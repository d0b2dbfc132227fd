package integration

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// `berth check` reports no difference for the files of `berth run`, neither while its pod runs nor
// afterwards.
func TestStateCheckAfterBerthRun(t *testing.T) {
	d := harness.StartDaemon(t)
	d.EnsureImage(t, harness.BaseImage)
	manifest := filepath.Join(d.Dir, "pod.yaml")
	harness.Must(t, os.WriteFile(manifest, []byte(`
apiVersion: v1
kind: Pod
metadata: {name: kept}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers: [{name: c, image: "`+harness.BaseImage+`", imagePullPolicy: Never, command: [sleep, "100000"]}]
`), 0o600))
	runDir := filepath.Join(d.Root, "run") // like the default, /var/lib/berth/run in /var/lib/berth
	run := operatorCommand(d, "run", "--detach", "--run-dir", runDir, "--cgroup-parent", d.PodConfig(t).Linux.CgroupParent, manifest)
	id := strings.TrimSpace(string(harness.Get(run.Output())(t)))
	d.StateMatches(t)
	runBerth(t, d, "rm", "--run-dir", runDir, "--force", id)
	d.StateMatches(t)
	harness.Must(t, os.RemoveAll(runDir))
}

// Another berth on the machine causes no differences by its cgroups and directories, whether its
// daemon runs, was restarted or has exited.
func TestStateCheckWithAnotherDaemon(t *testing.T) {
	d, other := harness.StartDaemon(t), harness.StartDaemon(t)
	pod := d.RunPod(t)
	pod.Run(t)
	beside := func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = pod.Config.Linux.CgroupParent }
	its := other.RunPod(t, beside)
	c := its.Run(t)
	d.StateMatches(t)
	other.StateMatches(t)
	other.Restart(t)
	d.StateMatches(t)
	other.StateMatches(t)
	other.Kill(t)
	d.StateMatches(t)
	other.Start(t)
	c.Stop(t, 0)
	its.Remove(t)
	pod.Remove(t)
}

// checkOf runs `berth check` with only the daemon's socket and these flags.
func checkOf(t *testing.T, d *harness.Daemon, flags ...string) (out string, err error) {
	t.Helper()
	raw, err := d.Command(append([]string{"check", "--json", "--listen", d.Socket}, flags...)...).Output()
	return string(raw), err
}

// `berth check` uses the configuration and flags of the running daemon, unless its own flags
// override them.
func TestCheckUsesDaemonsConfiguration(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	pod.Run(t)
	var report struct {
		Differences              []harness.Difference
		Daemon, Pods, Containers int
	}
	out, err := checkOf(t, d, "--state")
	harness.Must(t, json.Unmarshal([]byte(out), &report))
	harness.Equal(t, "state: daemon, pods and containers of the report", fmt.Sprint(report.Daemon, report.Pods, report.Containers), fmt.Sprint(d.Cmd.Process.Pid, 1, 1))
	if err != nil || len(report.Differences) > 0 {
		t.Errorf("state: %v\n%s", err, out)
	}
	out, err = checkOf(t, d)
	for _, want := range []string{"of the daemon that serves on " + d.Socket, "room in " + d.Root, "ok"} {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("check: %v; the output does not contain %q:\n%s", err, want, out)
		}
	}
	out, err = checkOf(t, d, "--state", "--root", filepath.Join(d.Dir, "none"))
	if err != nil || !strings.Contains(out, `"daemon": 0`) || !strings.Contains(out, `"pods": 0`) {
		t.Errorf("state of another root: %v\n%s", err, out)
	}
	out, err = checkOf(t, d, "--config", os.DevNull)
	if err != nil || strings.Contains(out, d.Root) {
		t.Errorf("check of a configuration file: %v; the output mentions the daemon's root:\n%s", err, out)
	}
	d.Kill(t)
	if out, _ = checkOf(t, d); !strings.Contains(out, "none answers at "+d.Socket) {
		t.Errorf("the output of check does not mention that no daemon answers:\n%s", out)
	}
	d.Start(t)
	pod.Remove(t)
}

// The check reports no problem with user namespaces if pods can have them, for any mode of the
// state directory.
func TestCheckOfUserNamespaces(t *testing.T) {
	d := harness.StartDaemon(t)
	const base = 6 * usernsLength
	pod := d.RunPod(t, userNamespace(base))
	harness.Equal(t, "a container in a user namespace", pod.Sh(t, "echo fine", inUserNamespace(base)), "fine\n")
	harness.Equal(t, "mode of the state directory", harness.Get(os.Stat(d.State))(t).Mode().Perm(), os.FileMode(0o700))
	out, err := checkOf(t, d)
	var findings []struct{ Subject, Level, Found string }
	harness.Must(t, json.Unmarshal([]byte(out), &findings))
	for _, f := range findings {
		if f.Subject == "user namespaces" && f.Level != "ok" || err != nil {
			t.Errorf("check: %v; the result for user namespaces is %s, %s", err, f.Level, f.Found)
		}
	}
	if !strings.Contains(out, `"user namespaces"`) {
		t.Error("the output of check has no result for user namespaces")
	}
	pod.Remove(t)
}
