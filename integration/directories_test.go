package integration

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// A daemon with a root that does not know the node's pods, or with another state directory, does
// not start. The check of the configuration says so before. The pods keep running, and the next
// daemon with the right directories has them.
func TestWrongDirectories(t *testing.T) {
	away := func(path string) string { return path + ".away" }
	replace := func(t *testing.T, path, by string) func() {
		harness.Must(t, os.Rename(path, away(path)))
		if by != "" {
			harness.Must(t, os.Rename(by, path))
		}
		return func() {
			harness.Must(t, os.RemoveAll(path))
			harness.Must(t, os.Rename(away(path), path))
		}
	}
	cover := func(t *testing.T, path string) func() {
		harness.Must(t, unix.Mount("wrong", path, "tmpfs", 0, "mode=700"))
		return func() { harness.Must(t, unix.Unmount(path, unix.MNT_DETACH)) }
	}
	backup := func(t *testing.T, path string) string {
		harness.Must(t, exec.Command("cp", "-a", path, path+".backup").Run())
		return path + ".backup"
	}
	for _, c := range []struct {
		name  string
		early func(t *testing.T, d *harness.Daemon)               // before the pod runs; nil: nothing
		spoil func(t *testing.T, d *harness.Daemon) (undo func()) // after the daemon was stopped
		flags func(d *harness.Daemon) []string
		want  string
	}{
		{name: "root is not mounted", want: "no berth has used this directory",
			spoil: func(t *testing.T, d *harness.Daemon) func() { return cover(t, d.Root) }},
		{name: "root is gone", want: "no berth has used this directory",
			spoil: func(t *testing.T, d *harness.Daemon) func() { return replace(t, d.Root, "") }},
		{name: "another root", want: "no berth has used this directory",
			spoil: func(*testing.T, *harness.Daemon) func() { return func() {} },
			flags: func(d *harness.Daemon) []string { return []string{"--root", d.Dir + "/root2"} }},
		{name: "the root of another node", want: "another root than the one",
			spoil: func(t *testing.T, d *harness.Daemon) func() {
				undo := cover(t, d.Root)
				harness.Must(t, os.WriteFile(d.Root+"/identity", fmt.Appendf(nil, `{"id":"ANOTHER","state":%q}`, d.State), 0o600))
				harness.Must(t, os.Mkdir(d.Root+"/pods", 0o700))
				return undo
			}},
		{name: "a copy of root from a backup", want: "it is a copy of the root",
			early: func(t *testing.T, d *harness.Daemon) { backup(t, d.Root) },
			spoil: func(t *testing.T, d *harness.Daemon) func() { return replace(t, d.Root, d.Root+".backup") }},
		{name: "an older snapshot of root", want: "it is older than they are",
			early: func(t *testing.T, d *harness.Daemon) { backup(t, d.Root+"/pods"); backup(t, d.Root+"/containers") },
			spoil: func(t *testing.T, d *harness.Daemon) func() {
				pods := replace(t, d.Root+"/pods", d.Root+"/pods.backup")
				containers := replace(t, d.Root+"/containers", d.Root+"/containers.backup")
				return func() { pods(); containers() }
			}},
		{name: "the records were removed", want: "its folders of records were removed",
			spoil: func(t *testing.T, d *harness.Daemon) func() {
				pods, containers := replace(t, d.Root+"/pods", ""), replace(t, d.Root+"/containers", "")
				return func() { pods(); containers() }
			}},
		{name: "the records of containers were removed", want: "its folders of records were removed",
			spoil: func(t *testing.T, d *harness.Daemon) func() { return replace(t, d.Root+"/containers", "") }},
		{name: "neither root nor state is mounted", want: "no berth has used this directory",
			spoil: func(t *testing.T, d *harness.Daemon) func() {
				root, state := cover(t, d.Root), cover(t, d.State)
				return func() { root(); state() }
			}},
		{name: "another state directory", want: "is not the state directory of 2 pods and containers",
			spoil: func(*testing.T, *harness.Daemon) func() { return func() {} },
			flags: func(d *harness.Daemon) []string { return []string{"--state", d.Dir + "/state2"} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := harness.StartDaemon(t)
			if c.early != nil {
				c.early(t, d)
			}
			pod := d.RunPod(t)
			container := pod.Run(t)
			pids := []int{container.Pid(t), pod.PausePID(t), harness.MonitorOf(t, d, container)}
			d.Stop(t)
			undo := c.spoil(t, d)
			var flags []string
			if c.flags != nil {
				flags = c.flags(d)
			}
			flags = append(d.Flags(), flags...)
			wantRefusal(t, d.Command(append([]string{"config", "check"}, flags...)...), c.want, "berth reset")
			wantRefusal(t, d.DaemonCommand(flags...), c.want, "berth reset")
			for _, pid := range pids {
				harness.Equal(t, fmt.Sprintf("process %d is alive", pid), machine.Alive(pid), true)
			}
			undo()
			for _, dir := range []string{"/root2", "/state2"} {
				harness.Must(t, os.RemoveAll(d.Dir+dir))
			}
			d.Start(t)
			harness.Equal(t, "the container's process", container.Pid(t), pids[0])
			harness.Equal(t, "the pod's state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
			harness.Must(t, os.RemoveAll(d.Root+".backup"))
		})
	}
}

// wantRefusal runs a daemon, or a check of its configuration, that must fail with these texts.
func wantRefusal(t *testing.T, cmd *exec.Cmd, want ...string) {
	t.Helper()
	cmd.WaitDelay = time.Second
	end := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() }) // a daemon that starts
	defer end.Stop()
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Errorf("%s: no error", cmd.Path)
	}
	harness.WantText(t, cmd.Path, string(out), want...)
}

// Two nodes share a machine. A daemon gets the root of one and the state directory of the other. It
// does not start, whether the other daemon runs or not, and no pod ends.
func TestCrossedDirectories(t *testing.T) {
	a, b := harness.StartDaemon(t), harness.StartDaemon(t)
	pods := []*harness.Pod{a.RunPod(t, harness.HostNetwork), b.RunPod(t, harness.HostNetwork)}
	containers := []*harness.Container{pods[0].Run(t), pods[1].Run(t)}
	pids := []int{containers[0].Pid(t), containers[1].Pid(t)}
	cross := func(d *harness.Daemon, root, state, want string) {
		t.Helper()
		flags := append(d.Flags(), "--root", root, "--state", state)
		wantRefusal(t, d.Command(append([]string{"config", "check"}, flags...)...), "another root than the one", "berth reset")
		wantRefusal(t, d.DaemonCommand(flags...), want)
	}
	a.Stop(t)
	cross(a, a.Root, b.State, "another berth uses "+b.State)
	cross(a, b.Root, a.State, "another berth uses "+b.Root)
	b.Stop(t)
	cross(a, a.Root, b.State, "another root than the one")
	cross(a, b.Root, a.State, "another root than the one")
	a.Start(t)
	b.Start(t)
	for i, c := range containers {
		harness.Equal(t, "the container's process", c.Pid(t), pids[i])
		pods[i].Remove(t) // each daemon's leak check sees the pods of both
	}
}

// Root is a snapshot that has one of two pods. The clock was ahead when the snapshot was made, so
// the time of its records does not show its age.
func TestOlderRootAndClockSetBack(t *testing.T) {
	d := harness.StartDaemon(t)
	d.RunPod(t, harness.HostNetwork)
	folders := []string{d.Root + "/pods", d.Root + "/containers"}
	for _, f := range folders {
		harness.Must(t, exec.Command("cp", "-a", f, f+".snapshot").Run())
	}
	later := d.RunPod(t, harness.HostNetwork).Run(t)
	pid, ahead := later.Pid(t), time.Now().AddDate(1, 0, 0)
	d.Stop(t)
	for _, f := range folders {
		harness.Must(t, os.Rename(f, f+".now"))
		harness.Must(t, os.Rename(f+".snapshot", f))
		harness.Must(t, os.Chtimes(f, ahead, ahead))
	}
	harness.WantText(t, "refusal", d.TryStart(t), "does not know 2 pods", "the clock was set back")
	harness.Equal(t, "the container is alive", machine.Alive(pid), true)
	for _, f := range folders {
		harness.Must(t, os.RemoveAll(f))
		harness.Must(t, os.Rename(f+".now", f))
	}
	d.Start(t)
	harness.Equal(t, "the container's process", later.Pid(t), pid)
}

// A root that was removed, copied to another disk, or moved does not matter if no pod runs.
func TestNewDirectoriesWithoutPods(t *testing.T) {
	d := harness.StartDaemon(t)
	d.RunPod(t).Remove(t)
	d.Stop(t)
	harness.Must(t, os.RemoveAll(d.Root))
	d.Start(t)
	d.RunPod(t).Remove(t)
	d.Stop(t)
	harness.Must(t, exec.Command("cp", "-a", d.Root, d.Root+".copy").Run())
	harness.Must(t, os.RemoveAll(d.Root))
	harness.Must(t, os.Rename(d.Root+".copy", d.Root))
	d.Start(t)
	pod := d.RunPod(t)
	c := pod.Run(t)
	pid := c.Pid(t)
	d.Stop(t)
	harness.Must(t, exec.Command("cp", "-a", d.Root, d.Root+".copy").Run()) // to another disk, with all records
	harness.Must(t, os.RemoveAll(d.Root))
	harness.Must(t, os.Rename(d.Root+".copy", d.Root))
	d.Start(t)
	harness.Equal(t, "the container's process", c.Pid(t), pid)
}

// A reload refuses a configuration with which the next daemon would not start.
func TestReloadOfDirectories(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithDirectoriesInConfig)
	pod := d.RunPod(t)
	reload := func(root, state, logged string) {
		t.Helper()
		reloadWith(t, d, fmt.Sprintf("root = %q\nstate = %q\n", root, state), logged)
	}
	reload(d.Dir+"/root2", d.State, "no berth has used this directory")
	reload(d.Root, d.Dir+"/state2", "is not the state directory of 1 pods")
	reload(d.Dir+"/root2", d.Dir+"/state2", "root and state are both changed")
	harness.Equal(t, "the pod's state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	pod.Remove(t)
	reload(d.Dir+"/root2", d.Dir+"/state2", `options="root state"`)
	reload(d.Root, d.State, "changed=\"\"") // as before
}

// berth reset ends pods that root does not know.
func TestResetOfUnknownPods(t *testing.T) {
	for name, alsoState := range map[string]bool{"root is empty": false, "root and state are empty": true} {
		t.Run(name, func(t *testing.T) {
			before := harness.MachineSnapshot(nil)
			d := harness.NewDaemon(t)
			d.Start(t)
			pod := d.RunPod(t)
			container := pod.Run(t)
			pids := []int{container.Pid(t), harness.MonitorOf(t, d, container)}
			if !alsoState {
				pids = append(pids, pod.PausePID(t))
			}
			d.Kill(t)
			harness.Must(t, os.RemoveAll(d.Root))
			if alsoState {
				d.LoseState(t)
			}
			out, err := reset(d, "--dry-run")
			harness.Must(t, err)
			if !strings.Contains(out, "that root does not know ("+container.Id[:12]) {
				t.Errorf("output:\n%s", out)
			}
			if out, err := reset(d, "--yes"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, pid := range pids {
				waitDead(t, pid)
			}
			if alsoState { // nothing names the pod any more
				d.KillAll(t)
				pin := "/run/netns/berth-" + pod.Id
				harness.Must(t, unix.Unmount(pin, unix.MNT_DETACH))
				harness.Must(t, os.Remove(pin))
				return
			}
			harness.NoMachineLeaks(t, before, d)
			harness.Equal(t, "addresses", fmt.Sprint(noAddresses(d)), "<nil>")
		})
	}
}
