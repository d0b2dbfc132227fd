package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// nriPlugin is an NRI plugin that uses the library's stub, like real plugins. It records its events
// as "event name". Functions that are not nil decide its answers.
type nriPlugin struct {
	stub   stub.Stub
	closed chan struct{} // closed when the connection to the runtime is closed

	create      func(pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error)
	update      func(c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error)
	ran         func(pod *api.PodSandbox)
	stopped     func(c *api.Container) []*api.ContainerUpdate
	removed     func(c *api.Container)
	synchronize func(pods []*api.PodSandbox, containers []*api.Container)
	before      func(event string) error // called with each event before it is recorded

	mu     sync.Mutex
	events []string
}

func (p *nriPlugin) note(event, name string) error {
	var err error
	if p.before != nil {
		err = p.before(event)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = append(p.events, event+" "+name)
	return err
}

func (p *nriPlugin) noted() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.events)
}

// waitEvents waits until the plugin has received exactly these events, in this order.
func (p *nriPlugin) waitEvents(t *testing.T, want ...string) {
	t.Helper()
	harness.EventuallyGot(t, fmt.Sprintf("events %q", want), func() (bool, any) { got := p.noted(); return slices.Equal(got, want), got })
}

// received returns an error unless the plugin has received an event.
func (p *nriPlugin) received(event string) error {
	if got := p.noted(); !slices.Contains(got, event) {
		return fmt.Errorf("the plugin got the events %v", got)
	}
	return nil
}

// awaitEvents waits until the plugin has received n events.
func (p *nriPlugin) awaitEvents(t *testing.T, n int) {
	t.Helper()
	harness.EventuallyGot(t, fmt.Sprintf("%d events", n), func() (bool, any) { got := len(p.noted()); return got >= n, got })
}

// livePod runs a pod with a container that exits at once, and removes it. It returns errors instead
// of failing the test, so that it may run in any goroutine.
func livePod(d *harness.Daemon, ctx context.Context, config *runtimeapi.PodSandboxConfig) error {
	id, err := d.Cri.RunPodSandbox(ctx, config, "")
	if err != nil {
		return err
	}
	p := &harness.Pod{D: d, Id: id, Config: config}
	c, err := d.Cri.CreateContainer(ctx, id, p.ContainerConfig(harness.Command("true"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }), config)
	if err == nil {
		err = d.Cri.StartContainer(ctx, c)
	}
	if err == nil {
		err = d.Cri.StopContainer(ctx, c, 0)
	}
	if err == nil {
		err = d.Cri.RemoveContainer(ctx, c)
	}
	return errors.Join(err, d.Cri.StopPodSandbox(ctx, id), d.Cri.RemovePodSandbox(ctx, id))
}

// forget empties the list of events.
func (p *nriPlugin) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = nil
}

func (p *nriPlugin) Synchronize(_ context.Context, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	if p.synchronize != nil {
		p.synchronize(pods, containers)
	}
	return nil, p.note("Synchronize", fmt.Sprint(len(pods), " ", len(containers)))
}

func (p *nriPlugin) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	if p.ran != nil {
		p.ran(pod)
	}
	return p.note("RunPodSandbox", pod.Name)
}

func (p *nriPlugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return p.note("StopPodSandbox", pod.Name)
}

func (p *nriPlugin) RemovePodSandbox(_ context.Context, pod *api.PodSandbox) error {
	return p.note("RemovePodSandbox", pod.Name)
}

func (p *nriPlugin) CreateContainer(_ context.Context, pod *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if err := p.note("CreateContainer", c.Name); err != nil || p.create == nil {
		return nil, nil, err
	}
	return p.create(pod, c)
}

func (p *nriPlugin) PostCreateContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	return p.note("PostCreateContainer", c.Name)
}

func (p *nriPlugin) StartContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	return p.note("StartContainer", c.Name)
}

func (p *nriPlugin) PostStartContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	return p.note("PostStartContainer", c.Name)
}

func (p *nriPlugin) UpdateContainer(_ context.Context, _ *api.PodSandbox, c *api.Container, r *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	if err := p.note("UpdateContainer", c.Name); err != nil || p.update == nil {
		return nil, err
	}
	return p.update(c, r)
}

func (p *nriPlugin) PostUpdateContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	return p.note("PostUpdateContainer", c.Name)
}

func (p *nriPlugin) StopContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	if err := p.note("StopContainer", c.Name); err != nil || p.stopped == nil {
		return nil, err
	}
	return p.stopped(c), nil
}

func (p *nriPlugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, c *api.Container) error {
	if p.removed != nil {
		p.removed(c)
	}
	return p.note("RemoveContainer", c.Name)
}

func nriSocket(d *harness.Daemon) string { return filepath.Join(d.Dir, "nri", "nri.sock") }

// connectPlugin connects a plugin to the daemon's NRI socket, and waits until it is registered.
// Stop or the end of the test disconnects it.
func connectPlugin(t *testing.T, d *harness.Daemon, index, name string, p *nriPlugin, options ...stub.Option) *nriPlugin {
	t.Helper()
	p.closed = make(chan struct{})
	var err error
	p.stub, err = stub.New(p, append(options, stub.WithSocketPath(nriSocket(d)), stub.WithPluginIdx(index), stub.WithPluginName(name),
		stub.WithOnClose(func() { close(p.closed) }), stub.WithLogger(quiet{}))...)
	harness.Must(t, err)
	harness.Must(t, p.stub.Start(t.Context()))
	t.Cleanup(func() { p.stub.Stop(); <-p.closed })
	harness.EventuallyTrue(t, "synchronisation of plugin "+name, func() bool { return len(p.noted()) > 0 })
	// The daemon registers the plugin a moment after its answer, and then logs it.
	harness.EventuallyTrue(t, "registration of plugin "+name, func() bool {
		want := fmt.Sprintf("plugin \\\"%s-%s\\\" connected and synchronized", index, name)
		return slices.ContainsFunc(machine.ReadLines(d.LogFile()), func(line string) bool { return strings.Contains(line, want) })
	})
	p.forget()
	return p
}

// quiet drops the library's log lines.
type quiet struct{}

func (quiet) Debugf(context.Context, string, ...any) {}
func (quiet) Infof(context.Context, string, ...any)  {}
func (quiet) Warnf(context.Context, string, ...any)  {}
func (quiet) Errorf(context.Context, string, ...any) {}

// installPlugin installs this program as a plugin that the daemon starts. It appends "PID event
// name" to a file. If hangAt names an event, the plugin hangs at it until resumeFile exists.
func installPlugin(name, hangAt string) harness.DaemonOption {
	return func(t *testing.T, d *harness.Daemon) {
		t.Helper()
		self := harness.Get(os.Executable())(t)
		for _, dir := range []string{"plugins", "plugins.d"} {
			harness.Must(t, os.MkdirAll(filepath.Join(d.Dir, dir), 0o755))
		}
		harness.Must(t, os.Symlink(self, filepath.Join(d.Dir, "plugins", name)))
		harness.Must(t, os.WriteFile(filepath.Join(d.Dir, "plugins.d", name+".conf"), []byte(installedEvents(d)+" "+hangAt), 0o600))
	}
}

// installedEvents returns the file in which installed plugins record their events.
func installedEvents(d *harness.Daemon) string { return filepath.Join(d.Dir, "plugin-events") }

// isInstalledPlugin reports whether a daemon has started this process as an NRI plugin.
func isInstalledPlugin() bool { return os.Getenv(api.PluginSocketEnvVar) != "" }

// installedPlugin is an nriPlugin in a separate process.
type installedPlugin struct {
	nriPlugin
	file, hangAt string
}

// Configure reads the configuration from installPlugin.
func (p *installedPlugin) Configure(_ context.Context, config, _, _ string) (stub.EventMask, error) {
	p.file, p.hangAt, _ = strings.Cut(config, " ")
	return 0, nil
}

func runInstalledPlugin() error {
	nrilog.Set(quiet{})
	p := &installedPlugin{}
	p.before = func(event string) error {
		f, err := os.OpenFile(p.file, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(f, os.Getpid(), event)
		if err = errors.Join(err, f.Close()); err == nil && event == p.hangAt {
			return harness.WaitUpTo(time.Hour, func() error { _, err := os.Stat(p.file + resumeSuffix); return err })
		}
		return err
	}
	s, err := stub.New(p, stub.WithLogger(quiet{}))
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}
