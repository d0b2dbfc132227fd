package integration

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// rebooted is a pod with a container in each state, and what is to be there of it after a reboot.
type rebooted struct {
	*harness.Pod
	inPod                    []harness.ContainerOption // what its containers need
	running, created, exited *harness.Container
	ended                    *runtimeapi.ContainerStatus // of exited
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
		content, err := os.ReadFile(c.LogPath())
		harness.Must(t, err)
		r.logs[c.LogPath()] = string(content)
	}
	return r
}

// check looks at what a daemon makes of the pod after a reboot: it and its containers have ended, their logs
// are there, nothing can be started in them.
func (r *rebooted) check(t *testing.T) {
	t.Helper()
	harness.Equal(t, "pod state", r.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	for name, c := range map[string]*harness.Container{"running": r.running, "created": r.created} {
		status := c.Status(t)
		harness.Equal(t, "state of the container that was "+name, status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
		harness.Equal(t, "exit code of the container that was "+name, status.ExitCode, 255)
		harness.Equal(t, "reason of the container that was "+name, status.Reason, "Unknown")
		harness.Equal(t, "message of the container that was "+name, status.Message, "the machine was restarted")
		if status.FinishedAt <= status.CreatedAt || status.FinishedAt < status.StartedAt {
			t.Errorf("the container that was %s is created at %d, started at %d, finished at %d", name, status.CreatedAt, status.StartedAt, status.FinishedAt)
		}
		if err := r.D.Cri.StartContainer(t.Context(), c.Id); err == nil {
			t.Errorf("the container that was %s started again", name)
		}
	}
	harness.Equal(t, "the status of the container that had exited", r.exited.Status(t).String(), r.ended.String())
	for path, want := range r.logs {
		content, err := os.ReadFile(path)
		harness.Must(t, err)
		harness.Equal(t, "the log "+path, string(content), want)
	}
	if _, err := r.TryCreate(t, r.inPod...); err == nil {
		t.Error("a container was created in the pod")
	}
}

// nextAttempt does what kubelet does after a reboot: it runs the next attempt of the pod and of its container, whose log is
// beside the old one, and removes the old pod only then.
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

// After a reboot no process is there, /run is empty and the boot ID is new: pods are not ready and give their addresses and host
// ports back without being asked, containers have exited, images and logs are there, and kubelet's next attempts run.
func TestReboot(t *testing.T) {
	const base = 5 * usernsLength
	d := harness.StartDaemon(t)
	pods := map[string]*rebooted{
		"host port":          newRebooted(t, d, []harness.PodOption{harness.HostPort(18089, 80, runtimeapi.Protocol_TCP)}),
		"shared PIDs":        newRebooted(t, d, []harness.PodOption{harness.SharedPID}),
		"the node's network": newRebooted(t, d, []harness.PodOption{harness.HostNetwork}),
		"a namespace of IDs": newRebooted(t, d, []harness.PodOption{userNamespace(base)}, inUserNamespace(base)),
	}
	stopped := d.RunPod(t)
	stopped.Stop(t)
	images := harness.Get(d.Images.ListImages(t.Context(), nil))(t)

	finished := map[string]int64{}
	for reboot := range 2 {
		d.LosePower(t)
		d.Boot(t)
		for name, r := range pods {
			t.Run(fmt.Sprintf("%s, reboot %d", name, reboot+1), r.check)
			at := r.running.Status(t).FinishedAt
			if reboot > 0 {
				harness.Equal(t, "the end of its container", at, finished[name])
			}
			finished[name] = at
		}
		harness.Equal(t, "the stopped pod's state", stopped.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
		harness.Eventually(t, "addresses are given back", func() error { return noAddresses(d) })
	}
	after := harness.Get(d.Images.ListImages(t.Context(), nil))(t)
	harness.Equal(t, "the images", fmt.Sprint(after), fmt.Sprint(images))
	for name, r := range pods {
		t.Run("the next attempt of "+name, r.nextAttempt)
	}
}

// noAddresses is an error if host-local has an address in use.
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
