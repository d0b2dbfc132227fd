package integration

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// rebooted is a pod with a container in each state, and their expected states after a reboot.
type rebooted struct {
	*harness.Pod
	inPod                    []harness.ContainerOption // options that its containers need
	running, created, exited *harness.Container
	ended                    *runtimeapi.ContainerStatus // status of exited
	logs                     map[string]string           // content by path
}

func newRebooted(t *testing.T, d *harness.Daemon, pod []harness.PodOption, inPod ...harness.ContainerOption) *rebooted {
	t.Helper()
	r := &rebooted{Pod: d.RunPod(t, pod...), inPod: inPod, logs: map[string]string{}}
	r.running = r.Run(t, append(inPod, harness.Script("echo running; sleep 100000"))...)
	r.created = r.Create(t, inPod...)
	r.exited, r.ended = r.RunToEnd(t, append(inPod, harness.Script("echo exited; exit 9"))...)
	r.running.WaitOutput(t, "running\n")
	for _, c := range []*harness.Container{r.running, r.exited} {
		content := harness.Get(os.ReadFile(c.LogPath()))(t)
		r.logs[c.LogPath()] = string(content)
	}
	return r
}

// Messages of containers that ended with a reboot.
const (
	afterReboot  = "the node was restarted"
	afterRestart = "the node was restarted, or its state directory was emptied" // the boot ID is the same
)

// check checks the pod after a reboot. The pod and its containers have ended, their logs exist, and
// the containers cannot be started.
func (r *rebooted) check(t *testing.T, message string) {
	t.Helper()
	harness.Equal(t, "pod state", r.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	for name, c := range map[string]*harness.Container{"running": r.running, "created": r.created} {
		status := c.Status(t)
		harness.Equal(t, "state of the container that was "+name, status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
		harness.Equal(t, "exit code of the container that was "+name, status.ExitCode, 255)
		harness.Equal(t, "reason of the container that was "+name, status.Reason, "Unknown")
		harness.Equal(t, "message of the container that was "+name, status.Message, message)
		if status.FinishedAt <= status.CreatedAt || status.FinishedAt < status.StartedAt {
			t.Errorf("the container that was %s is created at %d, started at %d, finished at %d", name, status.CreatedAt, status.StartedAt, status.FinishedAt)
		}
		if err := r.D.Cri.StartContainer(t.Context(), c.Id); err == nil {
			t.Errorf("the container that was %s started again", name)
		}
	}
	harness.Equal(t, "the status of the container that had exited", r.exited.Status(t).String(), r.ended.String())
	for path, want := range r.logs {
		content := harness.Get(os.ReadFile(path))(t)
		harness.Equal(t, "the log "+path, string(content), want)
	}
	if _, err := r.TryCreate(t, r.inPod...); err == nil {
		t.Error("a container was created in the pod")
	}
}

// nextAttempt acts as kubelet does after a reboot. It runs the next attempt of the pod and its
// container, with a new log next to the old one, and then removes the old pod.
func (r *rebooted) nextAttempt(t *testing.T) {
	config := proto.CloneOf(r.Config)
	config.Metadata.Attempt++
	pod := r.D.RunPodConfig(t, config)
	harness.Equal(t, "state of the next attempt", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	c := pod.Run(t, append(r.inPod, harness.ContainerNamed(r.running.Config.Metadata.Name), func(c *runtimeapi.ContainerConfig) {
		c.Metadata.Attempt = 1
		c.LogPath = filepath.Join(c.Metadata.Name, "1.log")
	}, harness.Script("echo again; sleep 100000"))...)
	c.WaitOutput(t, "again\n")
	harness.Equal(t, "exec", c.Exec(t, "echo", "fine"), "fine")
	r.Remove(t)
	harness.Equal(t, "exec after the old pod was removed", c.Exec(t, "echo", "fine"), "fine")
	pod.Remove(t)
}

func podsToReboot(t *testing.T, d *harness.Daemon) map[string]*rebooted {
	t.Helper()
	const base = 5 * usernsLength
	return map[string]*rebooted{
		"host port":          newRebooted(t, d, []harness.PodOption{harness.HostPort(18089, 80, runtimeapi.Protocol_TCP)}),
		"shared PIDs":        newRebooted(t, d, []harness.PodOption{harness.SharedPID}),
		"the node's network": newRebooted(t, d, []harness.PodOption{harness.HostNetwork}),
		"a namespace of IDs": newRebooted(t, d, []harness.PodOption{userNamespace(base)}, inUserNamespace(base)),
	}
}

// A node that is a container (kind, LXC, nspawn) restarts with its host's boot ID. /run is empty
// and no process is left. The state is as after a reboot, twice.
func TestRestartOfTheNodeInTheSameBoot(t *testing.T) {
	d := harness.StartDaemon(t)
	pods := podsToReboot(t, d)
	for restart := range 2 {
		d.LosePower(t)
		d.Start(t)
		for name, r := range pods {
			t.Run(fmt.Sprintf("%s, restart %d", name, restart+1), func(t *testing.T) { r.check(t, afterRestart) })
		}
		harness.Eventually(t, "addresses are released", func() error { return noAddresses(d) })
		d.Restart(t) // only the daemon restarts, not the node
	}
	for name, r := range pods {
		t.Run("the next attempt of "+name, r.nextAttempt)
	}
	d.StateSettles(t)
}

// While pods run, the state directory is emptied or covered by another filesystem. The next daemon
// does not start, and the pods keep running. It has them again when nothing covers the directory.
// `berth reset` gives them up.
func TestStateDirectoryIsLostWhilePodsRun(t *testing.T) {
	t.Run("covered", func(t *testing.T) {
		d := harness.StartDaemon(t)
		lost := loseState(t, d, func() { harness.Must(t, unix.Mount("run", d.State, "tmpfs", 0, "mode=700")) })
		harness.Must(t, unix.Unmount(d.State, unix.MNT_DETACH))
		d.Start(t)
		for i, r := range lost.pods {
			harness.Equal(t, "the container's process", r.running.Pid(t), lost.inits[i])
			harness.Equal(t, "exec", r.running.Exec(t, "echo", "fine"), "fine")
		}
		d.StateSettles(t)
	})
	t.Run("emptied", func(t *testing.T) {
		before := harness.MachineSnapshot(nil)
		d := harness.NewDaemon(t)
		d.Start(t)
		lost := loseState(t, d, func() { d.LoseState(t) })
		if out, err := reset(d, "--yes"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for _, pid := range append(lost.inits, lost.others...) {
			waitDead(t, pid)
		}
		harness.Eventually(t, "addresses are released", func() error { return noAddresses(d) })
		harness.NoMachineLeaks(t, before, d)
	})
}

// stateless are pods that run without their state directory.
type stateless struct {
	pods          []*rebooted
	inits, others []int // processes of their containers; their pauses and monitors
}

// loseState runs pods, loses the state directory, and checks that no daemon starts.
func loseState(t *testing.T, d *harness.Daemon, lose func()) (l stateless) {
	t.Helper()
	l.pods = []*rebooted{
		newRebooted(t, d, []harness.PodOption{harness.HostPort(18089, 80, runtimeapi.Protocol_TCP)}),
		newRebooted(t, d, []harness.PodOption{harness.SharedPID}),
	}
	for _, r := range l.pods {
		l.inits = append(l.inits, r.running.Pid(t))
		l.others = append(l.others, r.PausePID(t), harness.MonitorOf(t, d, r.running))
	}
	d.Kill(t)
	lose()
	harness.WantText(t, "refusal", d.TryStart(t), "state "+d.State, "does not have 4 pods and containers that run on this node")
	for _, pid := range append(l.inits, l.others...) {
		if !machine.Alive(pid) {
			t.Errorf("process %d ended after the loss of the state directory", pid)
		}
	}
	return l
}

// If only the ID of the state directory is lost, all pods keep running.
func TestStateDirectoryLosesItsID(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	running, created := pod.Run(t), pod.Create(t)
	pid := running.Pid(t)
	d.Kill(t)
	harness.Must(t, os.Remove(filepath.Join(d.State, "run-id")))
	for range 2 { // the second daemon finds the new ID, also in records
		d.Start(t)
		harness.Equal(t, "state of the pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
		harness.Equal(t, "process of the container", running.Pid(t), pid)
		harness.Equal(t, "state of the other container", created.Status(t).State, runtimeapi.ContainerState_CONTAINER_CREATED)
		d.StateMatches(t)
		d.Kill(t)
	}
	d.Start(t)
	created.Start(t)
	pod.Remove(t)
}

// After a reboot no processes are left, /run is empty and the boot ID is new. Pods are not ready,
// and their addresses and host ports are released. Containers have exited. Images and logs exist,
// and kubelet's next attempts run.
func TestReboot(t *testing.T) {
	d := harness.StartDaemon(t)
	pods := podsToReboot(t, d)
	stopped := d.RunPod(t)
	stopped.Stop(t)
	images := harness.Get(d.Images.ListImages(t.Context(), nil))(t)

	finished := map[string]int64{}
	for reboot := range 2 {
		d.LosePower(t)
		d.Boot(t)
		for name, r := range pods {
			t.Run(fmt.Sprintf("%s, reboot %d", name, reboot+1), func(t *testing.T) { r.check(t, afterReboot) })
			at := r.running.Status(t).FinishedAt
			if reboot > 0 {
				harness.Equal(t, "finish time of its container", at, finished[name])
			}
			finished[name] = at
		}
		harness.Equal(t, "the stopped pod's state", stopped.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
		harness.Eventually(t, "addresses are released", func() error { return noAddresses(d) })
	}
	after := harness.Get(d.Images.ListImages(t.Context(), nil))(t)
	harness.Equal(t, "the images", fmt.Sprint(after), fmt.Sprint(images))
	for name, r := range pods {
		t.Run("the next attempt of "+name, r.nextAttempt)
	}
}

// noAddresses returns an error if host-local has an address in use.
func noAddresses(d *harness.Daemon) error {
	for _, network := range machine.ReadDir(d.DataDir) {
		for _, name := range machine.ReadDir(filepath.Join(d.DataDir, network)) {
			if net.ParseIP(name) != nil {
				return fmt.Errorf("%s is taken", name)
			}
		}
	}
	return nil
}
