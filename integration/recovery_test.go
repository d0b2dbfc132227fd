package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// SIGTERM stops the daemon; containers run on, and the next daemon finds them.
func TestContainersSurviveSIGTERM(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	running, created := pod.run(t), pod.create(t)
	exited, before := pod.runToEnd(t, script("exit 9"))
	pid, ip := running.pid(t), pod.ip(t)
	d.stop(t)
	if !alive(pid) {
		t.Fatal("the container ended with the daemon")
	}
	d.start(t)
	status := pod.status(t)
	equal(t, "pod state", status.State, runtimeapi.PodSandboxState_SANDBOX_READY)
	equal(t, "pod IP", status.Network.GetIp(), ip)
	equal(t, "state of the running container", running.status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	equal(t, "its pid", running.pid(t), pid)
	equal(t, "state of the created container", created.status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
	after := exited.status(t)
	equal(t, "the exited container's status", after.String(), before.String())
	equal(t, "exec", running.exec(t, "echo", "still"), "still")
	created.start(t)
	equal(t, "exec in the container created before", created.exec(t, "echo", "new"), "new")
}

// kill -9 of the daemon under a running pod: after a restart the pod is ready,
// its log has no gap, and its exit code is right.
func TestKillDaemonUnderRunningPod(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	c := pod.run(t, script("i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i; sleep 0.005; done; exit 42"))
	c.waitOutput(t, "3\n")
	d.kill(t)
	reached := len(c.log(t))
	eventually(t, "the log grows without a daemon", func() error {
		if n := len(c.log(t)); n < reached+20 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	d.start(t)
	equal(t, "pod state", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	equal(t, "container state", c.status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	c.exec(t, "touch", "/tmp/stop")
	status := c.waitExited(t)
	equal(t, "exit code", status.ExitCode, 42)
	for i, l := range c.log(t) {
		if l.text != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l.text)
		}
	}
}

// What ends while no daemon runs is known to the next one.
func TestExitWhileDaemonIsDown(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	exits := pod.run(t, script("trap 'exit 11' TERM; echo ready; while :; do sleep 0.02; done"))
	oom := pod.run(t, resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 }),
		script("trap 'exec tail /dev/zero' TERM; echo ready; while :; do sleep 0.02; done"))
	exits.waitOutput(t, "ready")
	oom.waitOutput(t, "ready")
	pids := []int{exits.pid(t), oom.pid(t)}
	d.kill(t)
	for _, pid := range pids {
		must(t, syscall.Kill(pid, syscall.SIGTERM))
		eventually(t, "the container ends", func() error {
			if alive(pid) {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
	}
	d.start(t)
	status := exits.waitExited(t)
	equal(t, "exit code", status.ExitCode, 11)
	equal(t, "reason", status.Reason, "Error")
	if status.FinishedAt <= status.StartedAt {
		t.Errorf("finished_at is %d, started_at %d", status.FinishedAt, status.StartedAt)
	}
	equal(t, "reason of the container out of memory", oom.waitExited(t).Reason, "OOMKilled")
}

// The pod's end while no daemon runs.
func TestPauseDiesWhileDaemonIsDown(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t)
	pause := pod.pausePID(t)
	d.kill(t)
	must(t, syscall.Kill(pause, syscall.SIGKILL))
	d.start(t)
	equal(t, "state", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	pod.remove(t)
}

// A monitor that is killed takes its container with it, and the status says so.
func TestMonitorKilled(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t)
	var parent int
	_, err := fmt.Sscan(statusField(t, c.pid(t), "PPid"), &parent)
	must(t, err)
	must(t, syscall.Kill(parent, syscall.SIGKILL))
	status := c.waitExited(t)
	if status.ExitCode == 0 {
		t.Error("the exit code is 0")
	}
	if status.Reason == "" || status.Reason == "Completed" {
		t.Errorf("the reason is %q", status.Reason)
	}
	must(t, d.cri.RemoveContainer(t.Context(), c.id))
	equal(t, "another container runs", pod.sh(t, "echo fine"), "fine\n")
}

// The daemon is killed at a different moment of a pod's start each time. Whatever
// it got to, the next daemon can remove it, and the leak check finds nothing.
func TestKillDaemonDuringRunPodSandbox(t *testing.T) {
	d := startDaemon(t)
	d.pull(t, baseImage)
	for i := range 4 {
		config := d.podConfig(t)
		done := make(chan error, 1)
		go func() {
			_, err := d.cri.RunPodSandbox(t.Context(), config, "")
			done <- err
		}()
		// Each round waits for one more sign of progress before it kills.
		_ = waitForProgress(d, i)
		d.signal(t, syscall.SIGKILL)
		<-done
		d.disconnect(t)
		d.start(t)
		for _, item := range get(d.cri.ListPodSandbox(t.Context(), nil))(t) {
			d.objects = append(d.objects, item.Id)
		}
		// kubelet asks again for the same pod, and must get it or a clear answer.
		if id, err := d.cri.RunPodSandbox(t.Context(), config, ""); err == nil {
			d.objects = append(d.objects, id)
			(&pod{d: d, id: id, config: config}).remove(t)
		} else {
			t.Errorf("the same pod cannot be run after a crash: %v", err)
		}
		d.clean(t)
		d.pull(t, baseImage)
	}
}

// waitForProgress waits for the step-th sign of a pod's start: its record, its
// network namespace, its address, its pause process.
func waitForProgress(d *daemon, step int) error {
	return waitFor(func() error {
		seen := false
		switch step {
		case 0:
			seen = true
		case 1:
			seen = len(readDir("/run/netns")) > 0
		case 2:
			for _, network := range readDir(d.dataDir) {
				for _, name := range readDir(d.dataDir + "/" + network) {
					seen = seen || strings.Count(name, ".") == 3 && name[0] == '1'
				}
			}
		default:
			seen = len(commandLines("/pause")) > 0
		}
		if !seen {
			return fmt.Errorf("not yet")
		}
		return nil
	})
}

// After a reboot nothing runs and /run is empty, but the addresses of the pods are
// still taken. Pods are not ready, containers have exited, and removal gives the
// addresses back.
func TestReboot(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, sharedPID)
	running := pod.run(t)
	exited, before := pod.runToEnd(t, script("exit 9"))
	pause := pod.pausePID(t)
	d.kill(t)

	must(t, syscall.Kill(pause, syscall.SIGKILL)) // process 1 of the pod: all others go with it
	eventually(t, "the pod's processes are gone", func() error {
		if left := commandLines("berth-monitor"); len(left) > 0 || alive(pause) {
			return fmt.Errorf("still there: %q", left)
		}
		return nil
	})
	d.forgetMounts(t)
	must(t, os.RemoveAll(d.state))
	for _, name := range readDir("/run/netns") {
		must(t, syscall.Unmount("/run/netns/"+name, syscall.MNT_DETACH))
		must(t, os.Remove("/run/netns/"+name))
	}
	removeLink(t, "berth0")
	for _, flag := range []string{"-F", "-X"} {
		if out, err := exec.Command("iptables", "-t", "nat", flag).CombinedOutput(); err != nil {
			t.Fatalf("iptables %s: %v: %s", flag, err, out)
		}
	}
	fakeBootID(t)
	d.start(t)

	equal(t, "pod state", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	status := running.status(t)
	equal(t, "state of the container that ran", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
	if status.ExitCode == 0 || status.FinishedAt == 0 {
		t.Errorf("its exit code is %d, its end %d", status.ExitCode, status.FinishedAt)
	}
	equal(t, "exit code of the container that had exited", exited.status(t).ExitCode, before.ExitCode)
	pod.remove(t)
}

// fakeBootID gives this machine another boot ID until the test ends.
func fakeBootID(t *testing.T) {
	t.Helper()
	const path = "/proc/sys/kernel/random/boot_id"
	file := filepath.Join(t.TempDir(), "boot_id")
	must(t, os.WriteFile(file, []byte("00000000-1111-2222-3333-444444444444\n"), 0o444))
	must(t, syscall.Mount(file, path, "", syscall.MS_BIND, ""))
	t.Cleanup(func() { must(t, syscall.Unmount(path, 0)) })
}

func TestSecondDaemonRefused(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	other := newDaemon(t)
	for _, c := range []struct{ name, root, state string }{
		{"same root", d.root, other.state},
		{"same state", other.root, d.state},
	} {
		t.Run(c.name, func(t *testing.T) {
			second := d.command("serve", "--config", d.configFile(), "--listen", other.socket, "--root", c.root, "--state", c.state, "--cni-conf-dir", d.confDir)
			out, err := second.CombinedOutput()
			if err == nil {
				t.Fatalf("a second daemon ran:\n%s", out)
			}
			if !strings.Contains(string(out), d.root) && !strings.Contains(string(out), d.state) {
				t.Errorf("the message does not name the directory:\n%s", out)
			}
		})
	}
	equal(t, "the first daemon's pod", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
}
