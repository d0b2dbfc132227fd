package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// hang mounts a FUSE filesystem without a server on a directory until the test ends. Each stat of
// it blocks.
func hang(t *testing.T, dir string) {
	t.Helper()
	fd := harness.Get(unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0))(t)
	harness.Must(t, unix.Mount("hung", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	t.Cleanup(func() {
		harness.Must(t, unix.Close(fd)) // blocked calls return an error
		harness.Must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
}

// A volume that no longer answers, such as NFS with a dead server, delays neither the plugins'
// events nor the daemon's start.
func TestNRIHungVolume(t *testing.T) {
	d := harness.StartDaemon(t)
	volume := filepath.Join(d.Dir, "volume")
	harness.Must(t, os.Mkdir(volume, 0o755))
	p := connectPlugin(t, d, "10", "before", &nriPlugin{})
	pod := d.RunPod(t, harness.HostNetwork)
	withVolume := harness.Mount(&runtimeapi.Mount{ContainerPath: "/volume", HostPath: volume})
	ends, stays := pod.Run(t, withVolume), pod.Run(t, withVolume)
	hang(t, volume)
	p.forget()
	ends.Stop(t, 0)
	p.waitEvents(t, "StopContainer "+ends.Config.Metadata.Name)
	d.Restart(t)
	var got []*api.Container
	connectPlugin(t, d, "10", "after", &nriPlugin{synchronize: func(_ []*api.PodSandbox, c []*api.Container) { got = c }})
	if len(got) != 1 || got[0].Id != stays.Id || !slices.ContainsFunc(got[0].Mounts, func(m *api.Mount) bool { return m.Destination == "/volume" && m.Source == volume }) {
		t.Errorf("the new daemon sent the containers %v, want only %s", got, stays.Id)
	}
}

// A container exits while the daemon starts a plugin. The plugin gets the event.
func TestNRIExitWhileDaemonStarts(t *testing.T) {
	d := harness.StartDaemon(t, installPlugin("10-installed", "Synchronize"), resume, harness.WithConfig(`nri.request_timeout = "20s"`))
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	pid := c.Pid(t)
	d.Stop(t)
	harness.Must(t, os.Remove(resumeFile(d)))
	ended := make(chan error, 4)
	go func() {
		ended <- harness.WaitFor(func() error {
			if n := countInstalled(d, "Synchronize"); n != 2 {
				return harness.Unexpected("number of synchronisations", n, 2)
			}
			return nil
		})
		ended <- syscall.Kill(pid, syscall.SIGKILL)
		ended <- harness.WaitFor(func() error {
			record, err := os.ReadFile(filepath.Join(d.Root, "containers", c.Id+".record"))
			if err == nil && !strings.Contains(string(record), `"phase":"exited"`) {
				err = harness.Unexpected("the record", string(record), "exited")
			}
			return err
		})
		ended <- os.WriteFile(resumeFile(d), nil, 0o600)
	}()
	d.Start(t)
	for range 4 {
		harness.Must(t, <-ended)
	}
	harness.EventuallyGot(t, "one StopContainer event", func() (bool, any) { n := countInstalled(d, "StopContainer"); return n == 1, n })
}

// resumeFile is a file for which hanging installed plugins wait.
func resumeFile(d *harness.Daemon) string { return installedEvents(d) + resumeSuffix }

const resumeSuffix = ".go-on"

func resume(t *testing.T, d *harness.Daemon) {
	t.Helper()
	harness.Must(t, os.WriteFile(resumeFile(d), nil, 0o600))
}

// countInstalled counts an event in the logs of installed plugins.
func countInstalled(d *harness.Daemon, event string) (n int) {
	for _, line := range machine.ReadLines(installedEvents(d)) {
		if strings.HasSuffix(line, " "+event) {
			n++
		}
	}
	return n
}

// blocking returns a plugin that answers an event only after answer is closed. It closes asked when
// it gets the event.
func blocking(event string) (p *nriPlugin, asked, answer chan struct{}) {
	asked, answer = make(chan struct{}), make(chan struct{})
	return &nriPlugin{before: func(e string) error {
		if e == event {
			close(asked)
			<-answer
		}
		return nil
	}}, asked, answer
}

// A plugin updates one container during the creation of another. The first container exits
// meanwhile, and a second plugin registers. There is no deadlock, and the creation fails with the
// update.
func TestNRICreateBesideExitAndRegistration(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`nri.request_timeout = "20s"`))
	p, asked, answer := blocking("CreateContainer")
	pod := d.RunPod(t, harness.HostNetwork)
	other := pod.Run(t)
	p.create = func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		return nil, []*api.ContainerUpdate{memoryUpdate(other.Id, 64<<20)}, nil
	}
	connectPlugin(t, d, "10", "first", p)
	config := pod.ContainerConfig()
	made := harness.Go(func() error { _, err := d.Cri.CreateContainer(t.Context(), pod.Id, config, pod.Config); return err })
	<-asked
	second := &nriPlugin{closed: make(chan struct{})}
	second.stub = harness.Get(stub.New(second, stub.WithSocketPath(nriSocket(d)), stub.WithPluginIdx("20"), stub.WithPluginName("second"),
		stub.WithOnClose(func() { close(second.closed) }), stub.WithLogger(quiet{})))(t)
	harness.Must(t, second.stub.Start(t.Context())) // registered, and about to be synchronized
	t.Cleanup(func() { second.stub.Stop(); <-second.closed })
	harness.Must(t, syscall.Kill(other.Pid(t), syscall.SIGKILL))
	other.WaitExited(t)
	close(answer)
	harness.WantCode(t, <-made, codes.FailedPrecondition, "has exited")
	second.awaitEvents(t, 1)
	harness.Equal(t, "number of containers", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 1)
}

// A pod stops in time although plugins are slow to handle the exit events of its containers. They
// get these events before the pod's event.
func TestNRISlowPluginWhilePodStops(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`nri.request_timeout = "60s"`))
	p, asked, answer := blocking("StopContainer")
	connectPlugin(t, d, "10", "slow", p)
	pod := d.RunPod(t)
	c := pod.Run(t)
	netns := filepath.Join("/run/netns", "berth-"+pod.Id)
	p.forget()
	stopped := harness.Go(func() error { return d.Cri.StopPodSandbox(t.Context(), pod.Id) })
	<-asked
	harness.Eventually(t, "the network namespace is removed", func() error {
		if _, err := os.Lstat(netns); !os.IsNotExist(err) {
			return harness.Unexpected("error", err, os.ErrNotExist)
		}
		return nil
	})
	close(answer)
	harness.Must(t, <-stopped)
	p.waitEvents(t, "StopContainer "+c.Config.Metadata.Name, "StopPodSandbox "+pod.Config.Metadata.Name)
}

// A daemon that gets SIGTERM while it waits for a starting plugin exits.
func TestNRITermWhilePluginHangs(t *testing.T) {
	d := harness.NewDaemon(t, installPlugin("10-installed", "Synchronize"), harness.WithConfig(`nri.request_timeout = "5m"`))
	t.Cleanup(func() { d.ForgetMounts(t) })
	cmd := d.ServeCommand()
	harness.Must(t, cmd.Start())
	ended := harness.Go(cmd.Wait)
	harness.EventuallyGot(t, "one synchronization", func() (bool, any) { n := countInstalled(d, "Synchronize"); return n == 1, n })
	harness.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-ended:
	case <-time.After(harness.Patience):
		harness.Must(t, cmd.Process.Kill())
		<-ended
		t.Error("the daemon did not exit")
	}
	harness.Eventually(t, "the plugin exits", func() error {
		pid, _, _ := strings.Cut(machine.ReadLines(installedEvents(d))[0], " ")
		stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			return fmt.Errorf("process %s is there: %s", pid, stat)
		}
		return nil
	})
}

// A container that a plugin evicts gets its stop signal, and all plugins get the event. The
// eviction of an unknown container has no effect.
func TestNRIEvictions(t *testing.T) {
	d := harness.StartDaemon(t)
	e := &fixture.Evictor{}
	p := connectPlugin(t, d, "10", "evictor", &nriPlugin{}, e.Option())
	pod := d.RunPod(t, harness.HostNetwork)
	updated := pod.Run(t)
	for name, ask := range map[string]func(){
		"with a creation": func() { pod.Run(t) },
		"with an update": func() {
			harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), updated.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}}))
		},
		"by itself": func() { harness.Get(p.stub.UpdateContainers(nil))(t) },
	} {
		t.Run(name, func(t *testing.T) {
			e.Evict = nil
			c := pod.Run(t, harness.Script("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"))
			c.WaitOutput(t, "ready")
			p.forget()
			e.Evict = []*api.ContainerEviction{{ContainerId: "none"}, {ContainerId: c.Id, Reason: "no room"}}
			ask()
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, int32(5))
			stopped := "StopContainer " + c.Config.Metadata.Name
			harness.Eventually(t, stopped, func() error { return p.received(stopped) })
		})
	}
}
