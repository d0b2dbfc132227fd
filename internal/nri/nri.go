// Package nri calls plugins of the Node Resource Interface, which observe and change pods and
// containers: https://github.com/containerd/nri, version 0.12. It wraps the library's adaptation,
// which finds, starts, orders and calls the plugins.
//
// # Contract
//
// The library calls plugins one after the other in the order of their index, for one request at a
// time. It drops a plugin that does not answer within the request timeout, or whose connection
// breaks, and the request continues. A plugin may register to be kept, or to fail the request
// (FailurePolicy). A plugin that answers with an error fails the request, and later plugins do not
// get it. Stops, removals and Post events go to all plugins.
//
// A plugin that registers must receive every change. So callers change visible state in one of two
// ways:
//
//   - a new object is announced and then published, under one Hold;
//   - any other change is published and then announced under a Hold.
//
// A Hold is a read lock, and a registration takes the write lock. The holder must not wait for a
// goroutine that may take a Hold. Without plugins Hold returns false, and no other code of this
// package runs.
//
// Adjustments are applied or refused by name (see Check), never ignored. Only other plugins receive
// the annotations of plugins, because libcontainer and systemd interpret some of them as commands
// (CVE-2024-3154). Evictions are carried out, although the library ignores them (evict.go). In
// answers to a request, the library drops the pids limit from updates of other containers
// (TestPlugins). The limit arrives in adjustments and in unsolicited updates of a plugin.
//
// Plugin programs that berth started are reaped when they exit, even if they never registered, and
// Close kills them. If the daemon is killed, a hanging program survives. Other programs exit when
// their connection closes.
package nri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	validator "github.com/containerd/nri/plugins/default-validator/builtin"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/task"
)

// Config configures the plugins.
type Config struct {
	Version             string        // of the runtime, for plugins
	Waits               *task.Waits   // reports waits for plugins; may be nil
	Socket              string        // for external plugins; empty: none
	PluginDir           string        // programs to start with the daemon
	PluginConfigDir     string        // their configuration: NN-name.conf or name.conf
	RegistrationTimeout time.Duration // from connection to registration
	RequestTimeout      time.Duration // limit of one answer of a plugin
	Reject              []string      // kinds of adjustments that fail a container, as in the option nri.reject
	RequiredPlugins     []string      // plugins without which no container is created
	Log                 *slog.Logger
}

// Runtime is implemented by the container runtime.
type Runtime interface {
	// Objects returns all pods and containers.
	Objects() ([]*Pod, []*Container)
	// Update changes the resources of a container. It waits for the container's lock until ctx
	// ends. For an eviction it starts the stop and returns.
	Update(ctx context.Context, u Update) error
}

// Update is a change of a container's resources that a plugin requests.
type Update struct {
	ContainerID   string
	Resources     *runtimeapi.LinuxContainerResources // zero fields stay unchanged
	Limits        *Limits                             // limits that CRI has no field for
	IgnoreFailure bool                                // if it fails, the creation of the container continues

	Evict  bool   // stop the container; no other field except Reason is set
	Reason string // the plugin's reason for the eviction
}

// Empty reports whether the update changes nothing.
func (u Update) Empty() bool { return proto.Size(u.Resources) == 0 && u.Limits == nil && !u.Evict }

// Plugins is the set of plugins. It is safe for concurrent use.
type Plugins struct {
	cfg        Config
	adaptation *adaptation.Adaptation
	runtime    Runtime
	timeout    atomic.Int64 // of a request, a time.Duration
	count      atomic.Int32 // registered plugins
	starting   atomic.Bool  // Start is running, so plugins may not be counted yet

	own *task.Lifetime // runs the work after a synchronization and in Start; Close waits for it
}

// New prepares plugins without starting any. The library keeps timeouts and log in package
// variables, so a process can have only one Plugins.
//
// If another runtime listens on the socket, only programs in PluginDir can become plugins, until
// the daemon's next start. The library cannot open its socket later.
func New(cfg Config) (*Plugins, error) {
	p := &Plugins{cfg: cfg, own: task.NewLifetime()}
	if err := p.checkSocket(); err != nil {
		cfg.Log.Warn("no NRI plugin can connect until berth's next start", "error", err)
		p.cfg.Socket = ""
	}
	p.starting.Store(true)
	nrilog.Set(logger{cfg.Log})
	adaptation.SetPluginRegistrationTimeout(cfg.RegistrationTimeout)
	p.SetRequestTimeout(cfg.RequestTimeout)
	options := []adaptation.Option{
		adaptation.WithPluginPath(cfg.PluginDir),
		adaptation.WithPluginConfigPath(cfg.PluginConfigDir),
		adaptation.WithSocketPath(p.cfg.Socket),
		adaptation.WithMetrics(metrics{p}),
		adaptation.WithDefaultValidator(validatorConfig(cfg)),
		adaptation.WithTTRPCOptions(interceptors()),
	}
	if p.cfg.Socket == "" {
		options = append(options, adaptation.WithDisabledExternalConnections())
	}
	var err error
	if p.adaptation, err = adaptation.New("berth", cfg.Version, p.synchronize, p.unsolicited, options...); err != nil {
		return nil, fmt.Errorf("prepare NRI: %w", err)
	}
	return p, nil
}

func validatorConfig(cfg Config) *validator.DefaultValidatorConfig {
	rejects := map[string]bool{}
	for _, kind := range cfg.Reject {
		rejects[kind] = true
	}
	return &validator.DefaultValidatorConfig{
		Enable:                                len(cfg.Reject)+len(cfg.RequiredPlugins) > 0,
		RejectOCIHookAdjustment:               rejects["hooks"],
		RejectNamespaceAdjustment:             rejects["namespaces"],
		RejectSysctlAdjustment:                rejects["sysctl"],
		RejectRuntimeDefaultSeccompAdjustment: rejects["seccomp-default"],
		RejectCustomSeccompAdjustment:         rejects["seccomp-custom"],
		RejectUnconfinedSeccompAdjustment:     rejects["seccomp-unconfined"],
		RequiredPlugins:                       cfg.RequiredPlugins,
	}
}

// Start starts the plugins of PluginDir, reports all objects of rt to them, and then accepts
// external plugins. A plugin that fails to start is logged and skipped. Each may take the
// registration timeout and two request timeouts. Start fails if the directory or socket is
// unusable, or if ctx ends. Then the caller must call Close.
func (p *Plugins) Start(ctx context.Context, rt Runtime) error {
	p.runtime = rt
	started := make(chan error, 1)
	p.own.Spawn(func() {
		err := p.startLibrary()
		p.starting.Store(false)
		started <- err
	})
	select {
	case err := <-started:
		if err != nil {
			return fmt.Errorf("start NRI: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("start NRI plugins: %w", ctx.Err())
	}
}

// checkSocket refuses a socket with a listener, such as containerd's. The library would replace it.
func (p *Plugins) checkSocket() error {
	if p.cfg.Socket == "" {
		return nil
	}
	conn, err := net.DialTimeout("unix", p.cfg.Socket, time.Second)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil // no listener
	}
	if err != nil { // the socket may have a listener, for instance a busy one
		return errdefs.New(codes.FailedPrecondition, "NRI socket %s may belong to another runtime: %w", p.cfg.Socket, err)
	}
	_ = conn.Close() // no data was sent
	return errdefs.New(codes.FailedPrecondition,
		"NRI socket %s belongs to another runtime: set nri.socket to another path, or nri.enabled to false", p.cfg.Socket)
}

// closeTimeout limits how long Close waits for running updates and killed programs.
const closeTimeout = 5 * time.Second

// Close kills the plugins that Start has started, accepts no others, and waits up to closeTimeout
// for updates that plugins have requested. If Start was canceled, its remaining work ends with the
// process.
func (p *Plugins) Close() {
	p.own.Close()
	p.own.Cancel()
	if p.starting.Load() {
		return // the library cannot stop before it has started everything
	}
	p.adaptation.Stop()
	if err := p.own.WaitFor(closeTimeout); err != nil {
		p.cfg.Log.Warn("close NRI: plugins or their updates still run", "error", err)
	}
}

// Hold delays registrations of plugins until the caller calls release, which it must do. active
// reports whether any plugin exists. Hold waits for a registration in progress, which the request
// timeout limits. A goroutine must not hold twice.
func (p *Plugins) Hold() (release func(), active bool) {
	defer p.cfg.Waits.Begin("NRI registration", "NRI")()
	block := p.adaptation.BlockPluginSync()
	return block.Unblock, p.starting.Load() || p.count.Load() > 0
}

// synchronize reports all objects to a new plugin. Updates that the plugin requests in return are
// applied after its registration. Such an update may need a lock whose holder waits for the
// registration.
func (p *Plugins) synchronize(ctx context.Context, tell adaptation.SyncCB) (err error) {
	defer p.recovered("Synchronize", "a new plugin", &err) // a panic in the library's goroutine would end the daemon
	pods, containers := p.runtime.Objects()
	var apiPods []*api.PodSandbox
	for _, pod := range pods {
		apiPods = append(apiPods, pod.api())
	}
	var apiContainers []*api.Container
	for _, c := range containers {
		apiContainers = append(apiContainers, c.api())
	}
	updates, err := tell(ctx, apiPods, apiContainers)
	if err != nil {
		return err
	}
	if len(updates) > 0 {
		p.own.Spawn(func() { p.update(p.own.Context(), updates) }) // false: the daemon is stopping
	}
	return nil
}

// SetRequestTimeout limits a plugin's answer to requests that follow.
func (p *Plugins) SetRequestTimeout(timeout time.Duration) {
	p.timeout.Store(int64(timeout))
	adaptation.SetPluginRequestTimeout(timeout)
}

// unsolicited applies updates that a plugin sends without a request. It returns the failed ones. If
// an update waits for a lock longer than half the request timeout, it fails, because the lock's
// holder may be waiting for the plugin.
func (p *Plugins) unsolicited(ctx context.Context,
	updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(p.timeout.Load())/2)
	defer cancel()
	failed = p.update(ctx, updates)
	p.evict(ctx)
	return failed, nil
}

// evict carries out the evictions in a request of a plugin. The answer cannot report failures.
func (p *Plugins) evict(ctx context.Context) {
	asked, collected := ctx.Value(evictionsKey{}).(*evictions)
	if !collected {
		return
	}
	for _, u := range asked.updates() {
		if err := p.guardedUpdate(ctx, u); err != nil {
			p.cfg.Log.Warn("NRI plugin: evict container", "container", u.ContainerID, "error", err)
		}
	}
}

// update applies updates and returns the failed ones. It updates different containers in parallel,
// so a held lock delays only one container. It applies updates of one container in order.
func (p *Plugins) update(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate) {
	byContainer := map[string][]int{}
	for i, u := range updates {
		byContainer[u.GetContainerId()] = append(byContainer[u.GetContainerId()], i)
	}
	errs := make([]error, len(updates))
	var group sync.WaitGroup
	for _, indices := range byContainer {
		group.Go(func() {
			for _, i := range indices {
				errs[i] = p.updateOne(ctx, updates[i])
			}
		})
	}
	group.Wait()
	for i, u := range updates {
		if errs[i] == nil {
			continue
		}
		p.cfg.Log.Warn("NRI plugin: update container", "container", u.GetContainerId(), "error", errs[i])
		if !u.GetIgnoreFailure() {
			failed = append(failed, u)
		}
	}
	return failed
}

func (p *Plugins) updateOne(ctx context.Context, u *api.ContainerUpdate) (err error) {
	change, err := newUpdate(u)
	if err != nil {
		return err
	}
	return p.guardedUpdate(ctx, change)
}

func (p *Plugins) guardedUpdate(ctx context.Context, u Update) (err error) {
	defer p.recovered("UpdateContainers", u.ContainerID, &err)
	return p.runtime.Update(ctx, u)
}

// PodEvent is an event in the lifecycle of a pod.
type PodEvent string

// Events of pods. A plugin's error fails RunPod and UpdatePod.
const (
	RunPod     PodEvent = "RunPodSandbox"
	UpdatePod  PodEvent = "UpdatePodSandbox"
	PodUpdated PodEvent = "PostUpdatePodSandbox"
	PodStopped PodEvent = "StopPodSandbox"
	PodRemoved PodEvent = "RemovePodSandbox"
)

// Pod reports an event of a pod to the plugins.
func (p *Plugins) Pod(ctx context.Context, event PodEvent, pod *Pod) error {
	sandbox := pod.api()
	return p.relay(ctx, string(event), pod.ID, func() error {
		switch event {
		case RunPod:
			return p.adaptation.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: sandbox})
		case UpdatePod:
			_, err := p.adaptation.UpdatePodSandbox(ctx, &api.UpdatePodSandboxRequest{Pod: sandbox,
				OverheadLinuxResources: fromCRI(pod.WantedOverhead), LinuxResources: fromCRI(pod.WantedResources)})
			return err
		case PodUpdated:
			return p.adaptation.PostUpdatePodSandbox(ctx, &api.PostUpdatePodSandboxRequest{Pod: sandbox})
		case PodStopped:
			return p.adaptation.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: sandbox})
		case PodRemoved:
			return p.adaptation.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: sandbox})
		}
		return errdefs.Internal("NRI: unknown event %q", event)
	})
}

// ContainerEvent is an event in the lifecycle of a container.
type ContainerEvent string

// Events of containers. A plugin's error fails StartContainer.
const (
	ContainerCreated ContainerEvent = "PostCreateContainer"
	StartContainer   ContainerEvent = "StartContainer"
	ContainerStarted ContainerEvent = "PostStartContainer"
	ContainerUpdated ContainerEvent = "PostUpdateContainer"
	ContainerStopped ContainerEvent = "StopContainer"
	ContainerRemoved ContainerEvent = "RemoveContainer"
)

// Container reports an event of a container to the plugins. After a stop they may request updates
// of other containers.
func (p *Plugins) Container(ctx context.Context, event ContainerEvent, pod *Pod, c *Container) ([]Update, error) {
	sandbox, container := pod.api(), c.api()
	var updates []*api.ContainerUpdate
	err := p.relay(ctx, string(event), c.ID, func() error {
		switch event {
		case ContainerCreated:
			return p.adaptation.PostCreateContainer(ctx,
				&api.PostCreateContainerRequest{Pod: sandbox, Container: container})
		case StartContainer:
			return p.adaptation.StartContainer(ctx, &api.StartContainerRequest{Pod: sandbox, Container: container})
		case ContainerStarted:
			return p.adaptation.PostStartContainer(ctx, &api.PostStartContainerRequest{Pod: sandbox, Container: container})
		case ContainerUpdated:
			return p.adaptation.PostUpdateContainer(ctx,
				&api.PostUpdateContainerRequest{Pod: sandbox, Container: container})
		case ContainerStopped:
			response, err := p.adaptation.StopContainer(ctx, &api.StopContainerRequest{Pod: sandbox, Container: container})
			updates = response.GetUpdate()
			return err
		case ContainerRemoved:
			return p.adaptation.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: sandbox, Container: container})
		}
		return errdefs.Internal("NRI: unknown event %q", event)
	})
	if err != nil {
		return nil, err
	}
	return p.newUpdates(updates)
}

// CreateContainer asks the plugins for changes of a new container, including its limits. Plugins
// can also request updates and evictions of other containers.
//
// The error is Aborted if a plugin refuses the container, or if plugins contradict each other. It
// is Unimplemented or InvalidArgument as from Check.
func (p *Plugins) CreateContainer(ctx context.Context, pod *Pod, c *Container) (*Adjustment, Update, []Update, error) {
	container := c.api()
	env := container.Env
	ctx, evicted := withEvictions(ctx)
	var response *api.CreateContainerResponse
	err := p.relay(ctx, "CreateContainer", c.ID, func() (err error) {
		response, err = p.adaptation.CreateContainer(ctx, &api.CreateContainerRequest{Pod: pod.api(), Container: container})
		return err
	})
	if err != nil {
		return nil, Update{}, nil, err
	}
	addRemovals(response.GetAdjust(), env, container.Env)
	adjustment, limits, err := newAdjustment(response.GetAdjust())
	if err != nil {
		return nil, Update{}, nil, err
	}
	others, err := p.newUpdates(response.GetUpdate())
	return adjustment, limits, append(others, evicted.updates()...), err
}

// addRemovals adds the removals of environment variables to an adjustment. The library (0.12.5)
// leaves them out, but the container that the last plugin received lacks these variables.
func addRemovals(adjust *api.ContainerAdjustment, before, after []string) {
	left := map[string]bool{}
	for _, kv := range after {
		key, _, _ := strings.Cut(kv, "=")
		left[key] = true
	}
	for _, kv := range before {
		if key, _, _ := strings.Cut(kv, "="); !left[key] {
			adjust.RemoveEnv(key)
		}
	}
}

// UpdateContainer requests changes of an update from the plugins. It returns the update to apply to
// the container, and updates and evictions of other containers.
func (p *Plugins) UpdateContainer(ctx context.Context, pod *Pod, c *Container,
	wanted *runtimeapi.LinuxContainerResources) (Update, []Update, error) {
	own := Update{ContainerID: c.ID, Resources: wanted}
	ctx, evicted := withEvictions(ctx)
	var response *api.UpdateContainerResponse
	err := p.relay(ctx, "UpdateContainer", c.ID, func() (err error) {
		response, err = p.adaptation.UpdateContainer(ctx,
			&api.UpdateContainerRequest{Pod: pod.api(), Container: c.api(), LinuxResources: fromCRI(wanted)})
		return err
	})
	if err != nil {
		return own, nil, err
	}
	updates, err := p.newUpdates(response.GetUpdate())
	if err != nil {
		return own, nil, err
	}
	var others []Update
	for _, u := range updates {
		if u.ContainerID == c.ID {
			own = u
		} else {
			others = append(others, u)
		}
	}
	return own, append(others, evicted.updates()...), nil
}

// relay sends one request to the plugins. The library parses the plugins' answers. If it panics,
// relay returns an error for this request.
func (p *Plugins) relay(ctx context.Context, request, object string, do func() error) (err error) {
	defer p.recovered(request, object, &err)
	defer p.cfg.Waits.Begin("NRI "+request, object)()
	if err = do(); err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("NRI %s of %s: %w", request, object, err)
	}
	// The gRPC code of the plugin, or of its timeout, is replaced. kubelet would otherwise apply a
	// NotFound to the container.
	return errdefs.New(codes.Aborted, "NRI %s of %s: %w", request, object, err)
}

// recovered is deferred and converts a panic to an error.
func (p *Plugins) recovered(request, object string, err *error) {
	if r := recover(); r != nil {
		p.cfg.Log.Error("panic", "operation", "NRI "+request, "object", object, "panic", r, "stack", string(debug.Stack()))
		*err = errdefs.Internal("NRI %s of %s: internal error: %v", request, object, r)
	}
}

// metrics stores the number of plugins, which the library reports only to its metrics.
type metrics struct{ p *Plugins }

func (m metrics) UpdatePluginCount(n int) {
	if before := m.p.count.Swap(int32(n)); int(before) != n {
		m.p.cfg.Log.Info("number of NRI plugins changed", "plugins", n, "before", before)
	}
}

func (metrics) RecordPluginInvocation(string, string, error)                               {}
func (metrics) RecordPluginLatency(string, string, time.Duration)                          {}
func (metrics) RecordPluginAdjustments(string, string, *api.ContainerAdjustment, int, int) {}

// logger forwards the library's log. Its progress messages have the level debug.
type logger struct{ log *slog.Logger }

func (l logger) Debugf(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelDebug, format, args)
}
func (l logger) Infof(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelDebug, format, args)
}
func (l logger) Warnf(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelWarn, format, args)
}
func (l logger) Errorf(ctx context.Context, format string, args ...any) {
	l.write(ctx, slog.LevelError, format, args)
}

func (l logger) write(ctx context.Context, level slog.Level, format string, args []any) {
	for _, arg := range args {
		if err, ok := arg.(error); ok && errors.Is(err, adaptation.ErrWasmDisabled) {
			level = slog.LevelDebug // contrib/build omits this feature on purpose
		}
	}
	if l.log.Enabled(ctx, level) {
		l.log.Log(ctx, level, "NRI: "+fmt.Sprintf(format, args...))
	}
}
