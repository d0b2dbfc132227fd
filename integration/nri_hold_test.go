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
)

// hang makes every look at a directory wait: a FUSE filesystem is mounted on it that nobody serves. It ends with the test.
func hang(t *testing.T, dir string) {
	t.Helper()
	fd := get(unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0))(t)
	must(t, unix.Mount("hung", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	t.Cleanup(func() {
		must(t, unix.Close(fd)) // whoever waits gets an error
		must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
}

// A volume that does not answer any more, as of a dead NFS server, holds up neither what plugins are told nor the daemon's start.
func TestNRIHungVolume(t *testing.T) {
	d := startDaemon(t)
	volume := filepath.Join(d.dir, "volume")
	must(t, os.Mkdir(volume, 0o755))
	p := d.connectPlugin(t, "10", "before", &nriPlugin{})
	pod := d.runPod(t, hostNetwork)
	withVolume := mount(&runtimeapi.Mount{ContainerPath: "/volume", HostPath: volume})
	ends, stays := pod.run(t, withVolume), pod.run(t, withVolume)
	hang(t, volume)
	p.forget()
	ends.stop(t, 0)
	p.waitEvents(t, "StopContainer "+ends.config.Metadata.Name)
	d.restart(t)
	var told []*api.Container
	d.connectPlugin(t, "10", "after", &nriPlugin{synchronize: func(_ []*api.PodSandbox, c []*api.Container) { told = c }})
	if len(told) != 1 || told[0].Id != stays.id || !slices.ContainsFunc(told[0].Mounts, func(m *api.Mount) bool { return m.Destination == "/volume" && m.Source == volume }) {
		t.Errorf("the new daemon told of %v", told)
	}
}

// A plugin that the daemon starts is told of a container that ends while it takes its time to start.
func TestNRIExitWhileDaemonStarts(t *testing.T) {
	d := startDaemon(t, installPlugin("10-installed", "Synchronize"), goOn, withConfig(`nri_request_timeout = "20s"`))
	c := d.runPod(t, hostNetwork).run(t)
	pid := c.pid(t)
	d.stop(t)
	must(t, os.Remove(d.goOnFile()))
	ended := make(chan error, 4)
	go func() {
		ended <- waitFor(func() error {
			if n := d.installedTold("Synchronize"); n != 2 {
				return unexpected("number of synchronisations", n, 2)
			}
			return nil
		})
		ended <- syscall.Kill(pid, syscall.SIGKILL)
		ended <- waitFor(func() error {
			record, err := os.ReadFile(filepath.Join(d.root, "containers", c.id+".record"))
			if err == nil && !strings.Contains(string(record), `"phase":"exited"`) {
				err = unexpected("the record", string(record), "exited")
			}
			return err
		})
		ended <- os.WriteFile(d.goOnFile(), nil, 0o600)
	}()
	d.start(t)
	for range 4 {
		must(t, <-ended)
	}
	eventually(t, "StopContainer", func() error {
		if n := d.installedTold("StopContainer"); n != 1 {
			return unexpected("number of events", n, 1)
		}
		return nil
	})
}

// goOnFile lets installed plugins that hang go on, once it exists.
func (d *daemon) goOnFile() string { return d.installedEvents() + goOnSuffix }

const goOnSuffix = ".go-on"

// goOn makes the goOnFile.
func goOn(t *testing.T, d *daemon) { t.Helper(); must(t, os.WriteFile(d.goOnFile(), nil, 0o600)) }

// installedTold counts how often installed plugins were told of an event.
func (d *daemon) installedTold(event string) (n int) {
	for _, line := range readLines(d.installedEvents()) {
		if strings.HasSuffix(line, " "+event) {
			n++
		}
	}
	return n
}

// blocking is a plugin that does not answer an event before answer is closed. It closes asked.
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

// A plugin wants a container updated together with one that is made. The other ends meanwhile, and a second plugin registers:
// nobody waits for anybody, and the creation fails as the update does.
func TestNRICreateBesideExitAndRegistration(t *testing.T) {
	d := startDaemon(t, withConfig(`nri_request_timeout = "20s"`))
	p, asked, answer := blocking("CreateContainer")
	pod := d.runPod(t, hostNetwork)
	other := pod.run(t)
	p.create = func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
		return nil, []*api.ContainerUpdate{memoryUpdate(other.id, 64<<20)}, nil
	}
	d.connectPlugin(t, "10", "first", p)
	made := make(chan error, 1)
	config := pod.containerConfig()
	go func() {
		_, err := d.cri.CreateContainer(t.Context(), pod.id, config, pod.config)
		made <- err
	}()
	<-asked
	second := &nriPlugin{closed: make(chan struct{})}
	second.stub = get(stub.New(second, stub.WithSocketPath(d.nriSocket()), stub.WithPluginIdx("20"), stub.WithPluginName("second"),
		stub.WithOnClose(func() { close(second.closed) }), stub.WithLogger(quiet{})))(t)
	must(t, second.stub.Start(t.Context())) // it is registered, and about to be told what there is
	t.Cleanup(func() { second.stub.Stop(); <-second.closed })
	must(t, syscall.Kill(other.pid(t), syscall.SIGKILL))
	other.waitExited(t)
	close(answer)
	wantCode(t, <-made, codes.FailedPrecondition, "has exited")
	second.awaitEvents(t, 1)
	equal(t, "number of containers", len(get(d.cri.ListContainers(t.Context(), nil))(t)), 1)
}

// A pod is taken down however long plugins take to hear of its containers' ends, and they hear of those before they
// hear of the pod's.
func TestNRISlowPluginWhilePodStops(t *testing.T) {
	d := startDaemon(t, withConfig(`nri_request_timeout = "60s"`))
	p, asked, answer := blocking("StopContainer")
	d.connectPlugin(t, "10", "slow", p)
	pod := d.runPod(t)
	c := pod.run(t)
	netns := filepath.Join("/run/netns", "berth-"+pod.id)
	p.forget()
	stopped := make(chan error, 1)
	go func() { stopped <- d.cri.StopPodSandbox(t.Context(), pod.id) }()
	<-asked
	eventually(t, "the end of the network namespace", func() error {
		if _, err := os.Lstat(netns); !os.IsNotExist(err) {
			return unexpected("error", err, os.ErrNotExist)
		}
		return nil
	})
	close(answer)
	must(t, <-stopped)
	p.waitEvents(t, "StopContainer "+c.config.Metadata.Name, "StopPodSandbox "+pod.config.Metadata.Name)
}

// A daemon that is told to end while it waits for a plugin that it starts does so.
func TestNRITermWhilePluginHangs(t *testing.T) {
	d := newDaemon(t, installPlugin("10-installed", "Synchronize"), withConfig(`nri_request_timeout = "5m"`))
	t.Cleanup(func() { d.forgetMounts(t) })
	cmd := d.serveCommand()
	must(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	eventually(t, "synchronisation", func() error {
		if n := d.installedTold("Synchronize"); n != 1 {
			return unexpected("number of synchronisations", n, 1)
		}
		return nil
	})
	must(t, cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-ended:
	case <-time.After(patience):
		must(t, cmd.Process.Kill())
		<-ended
		t.Error("it did not end")
	}
	eventually(t, "the plugin's end", func() error {
		pid, _, _ := strings.Cut(readLines(d.installedEvents())[0], " ")
		stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			return fmt.Errorf("process %s is there: %s", pid, stat)
		}
		return nil
	})
}
