package integration

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// cadvisor sends requests to a daemon as cAdvisor does.
type cadvisor struct {
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	ctx        context.Context
}

func newCadvisor(t *testing.T, socket string) cadvisor {
	t.Helper()
	conn := harness.Get(grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	return cadvisor{containersapi.NewContainersClient(conn), tasksapi.NewTasksClient(conn), metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", "k8s.io")}
}

func (c cadvisor) container(id string) (*containersapi.Container, error) {
	resp, err := c.containers.Get(c.ctx, &containersapi.GetContainerRequest{ID: id}, grpc.WaitForReady(true))
	return resp.GetContainer(), err
}

func (c cadvisor) task(id string) (*tasktypes.Process, error) {
	resp, err := c.tasks.Get(c.ctx, &tasksapi.GetRequest{ContainerID: id}, grpc.WaitForReady(true))
	return resp.GetProcess(), err
}

// cAdvisor gets answers about pods and containers from the creation of their cgroups until their
// removal, also after a restart of the daemon.
func TestCadvisorSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "new", "cadvisor.sock")
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("cadvisor_socket = %q", socket)))
	info, err := os.Stat(socket)
	harness.Must(t, err)
	harness.Equal(t, "mode of the socket", info.Mode(), fs.ModeSocket|0o600)
	asked := newCadvisor(t, socket)

	pod := d.RunPod(t, harness.PodLabel("io.kubernetes.pod.name", "p"))
	c := pod.Create(t, harness.Command("sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done"))
	if _, err := asked.task(c.Id); status.Code(err) != codes.NotFound {
		t.Errorf("the task of a container that was not started: %v", err)
	}
	c.Start(t)
	check := func(what string) {
		t.Helper()
		sandbox := harness.Get(asked.container(pod.Id))(t)
		harness.Equal(t, what+": label of the pod", sandbox.Labels["io.kubernetes.pod.name"], "p")
		harness.Equal(t, what+": kind of the pod", sandbox.Labels["io.cri-containerd.kind"], "sandbox")
		pause := harness.Get(asked.task(pod.Id))(t)
		if pause.Pid == 0 || pause.Status != tasktypes.Status_RUNNING {
			t.Errorf("%s: the pause is %v", what, pause)
		}
		container := harness.Get(asked.container(c.Id))(t)
		harness.Equal(t, what+": kind of the container", container.Labels["io.cri-containerd.kind"], "container")
		harness.Equal(t, what+": image", container.Image, harness.BaseImage)
		harness.Equal(t, what+": process", int(harness.Get(asked.task(c.Id))(t).Pid), c.Pid(t))
	}
	check("after the start")
	d.Kill(t)
	d.Start(t)
	check("answer of the next daemon")

	c.Stop(t, 10)
	ended := harness.Get(asked.task(c.Id))(t)
	if ended.Status != tasktypes.Status_STOPPED || ended.ExitStatus != 7 || ended.Pid != 0 {
		t.Errorf("the exited container is %v", ended)
	}
	pod.Remove(t)
	for _, id := range []string{pod.Id, c.Id} {
		if _, err := asked.container(id); status.Code(err) != codes.NotFound {
			t.Errorf("%s is gone: %v", id, err)
		}
	}
	d.Stop(t)
	if _, err := os.Lstat(socket); !os.IsNotExist(err) {
		t.Errorf("the stopped daemon left the socket: %v", err)
	}
	d.Start(t)
}

// A pod's cgroup exists long before a slow network is up, and cAdvisor asks about it only once.
// Without an answer, the pod's statistics have neither labels nor network.
func TestCadvisorSocketListsStartingPods(t *testing.T) {
	dir := t.TempDir()
	goOn := filepath.Join(dir, "go-on")
	plugin := newFakePlugin(t, "fake", fmt.Sprintf("while [ ! -e %s ]; do sleep 0.05; done\n%s", goOn, fakeResult))
	socket := filepath.Join(dir, "cadvisor.sock")
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithConfig(fmt.Sprintf("cadvisor_socket = %q", socket)),
		harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake"}]}`))
	asked := newCadvisor(t, socket)
	config := d.PodConfig(t, harness.PodLabel("io.kubernetes.pod.name", "p"))
	run := harness.Go(func() error {
		id, err := d.Cri.RunPodSandbox(t.Context(), config, "")
		d.Objects = append(d.Objects, id)
		return err
	})
	harness.Must(t, harness.WaitFor(func() error {
		adds := plugin.calls("ADD")
		if len(adds) == 0 {
			return fmt.Errorf("ADD was not called")
		}
		sandbox, err := asked.container(adds[0].id)
		if err != nil {
			return err
		}
		harness.Equal(t, "kind", sandbox.Labels["io.cri-containerd.kind"], "sandbox")
		harness.Equal(t, "name", sandbox.Labels["io.kubernetes.pod.name"], "p")
		pause, err := asked.task(adds[0].id)
		if err == nil && pause.Pid == 0 {
			err = fmt.Errorf("its pause is %v", pause)
		}
		return err
	}))
	all := harness.Get(d.Cri.ListPodSandbox(t.Context(), &runtimeapi.PodSandboxFilter{}))(t)
	harness.Equal(t, "pods in the list", len(all), 0)
	harness.Must(t, os.WriteFile(goOn, nil, 0o600))
	harness.Must(t, <-run)
}

// When the start of a pod fails, the pause process ends while the daemon still detaches the
// network. Another process may get the same process ID meanwhile. cAdvisor would then count that
// process's network traffic for the pod.
func TestCadvisorSocketOmitsPauseOfFailedPod(t *testing.T) {
	dir := t.TempDir()
	fails, goOn := filepath.Join(dir, "fails"), filepath.Join(dir, "go-on")
	plugin := newFakePlugin(t, "fake", fmt.Sprintf(`while [ ! -e %s ]; do sleep 0.05; done
echo '{"cniVersion": "1.0.0", "code": 100, "msg": "no network"}'
exit 1
fi
if [ "$CNI_COMMAND" = DEL ]; then
[ $(grep -c ^DEL ${0%%/*}/calls) -gt 1 ] || exit 1 # the first is a part of the attempt
while [ ! -e %s ]; do sleep 0.05; done`, fails, goOn))
	socket := filepath.Join(dir, "cadvisor.sock")
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithConfig(fmt.Sprintf("cadvisor_socket = %q", socket)),
		harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake"}]}`))
	asked := newCadvisor(t, socket)
	config := d.PodConfig(t)
	run := harness.Go(func() error { _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); return err })
	harness.Eventually(t, "the pause runs", func() error {
		adds := plugin.calls("ADD")
		if len(adds) == 0 {
			return fmt.Errorf("ADD was not called")
		}
		_, err := asked.task(adds[0].id)
		return err
	})
	harness.Must(t, os.WriteFile(fails, nil, 0o600))
	harness.EventuallyGot(t, "the network is being detached", func() (bool, any) { n := len(plugin.calls("DEL")); return n >= 2, n })
	if pause, err := asked.task(plugin.calls("ADD")[0].id); status.Code(err) != codes.NotFound {
		t.Errorf("pause of a failed pod: %v, %v", pause, err)
	}
	harness.Must(t, os.WriteFile(goOn, nil, 0o600))
	harness.WantCode(t, <-run, codes.Internal, "no network")
}

// A daemon refuses to take over the socket of a running runtime. Its error names the socket.
func TestCadvisorSocketOfAnotherRuntime(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "containerd.sock")
	other := harness.Get(net.Listen("unix", socket))(t)
	defer other.Close()
	d := harness.NewDaemon(t, harness.WithConfig(fmt.Sprintf("cadvisor_socket = %q", socket)))
	out, err := d.ServeCommand().CombinedOutput()
	if err == nil || !strings.Contains(string(out), "cadvisor_socket") || !strings.Contains(string(out), fmt.Sprintf("process %d serves it", os.Getpid())) {
		t.Errorf("daemon on a socket in use: %v:\n%s", err, out)
	}
	if _, err := os.Lstat(d.Socket); !os.IsNotExist(err) {
		t.Errorf("the refused daemon left its own socket: %v", err)
	}
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatalf("socket of the other runtime: %v", err)
	}
	harness.Must(t, conn.Close())
}
