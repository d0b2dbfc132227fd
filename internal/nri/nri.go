// Package nri lets plugins of the Node Resource Interface see pods and containers and
// change them: https://github.com/containerd/nri, version 0.12. It wraps the library's
// adaptation, which finds, starts, orders and calls the plugins.
//
// # Contract
//
// Plugins are called one after the other in the order of their index, for one request at a
// time: so the library serialises them. A plugin that does not answer within the request
// timeout, or whose connection breaks, is dropped and the request goes on without it, unless
// it asked to be kept, or to fail requests, when it registered (FailurePolicy). What a plugin
// answers with an error fails the request that it was asked about, and the plugins after it are not told of
// that one: neither is a stop, a removal or a Post event.
//
// A caller that changes what plugins may see does so in one of two ways, so that a plugin that
// registers meanwhile misses nothing:
//
//   - what is new is announced and then published, under one Hold;
//   - everything else is published and then announced under a Hold.
//
// A Hold is a read lock, and a registration waits for all of them with the write lock: who has one must
// not wait for anybody who may take one. Without plugins Hold tells so, and nothing else of this package runs.
//
// Adjustments that plugins ask for are honoured or refused by name (see Check), never dropped in
// silence. Their annotations are shown to other plugins and reach nothing else: libcontainer
// and systemd read some annotations as commands (CVE-2024-3154). Evictions, too, are carried out, though the library
// knows of no such thing (evict.go). It drops the limit of processes from updates of other containers that are answers to a request (TestPlugins); in
// adjustments, and in updates that a plugin asks for by itself, it arrives.
//
// The programs that were started are reaped when they end, whether they registered or not, and killed by Close. One that
// hangs outlives a daemon that is killed; others end with their connection.
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

// Config says where plugins come from and what they may do.
type Config struct {
	Version             string        // of the runtime, told to plugins
	Waits               *task.Waits   // where waits for plugins are noted; nil: nowhere
	Socket              string        // where external plugins connect; empty: they may not
	PluginDir           string        // programs that are started with the daemon
	PluginConfigDir     string        // their configuration: NN-name.conf or name.conf
	RegistrationTimeout time.Duration // from connection to registration
	RequestTimeout      time.Duration // for each answer of a plugin
	Reject              []string      // kinds of adjustments that fail the container, as the option nri_reject names them
	RequiredPlugins     []string      // names of plugins without which no container is created
	Log                 *slog.Logger
}

// Runtime is what plugins see of the runtime, and how they change it.
type Runtime interface {
	// Objects returns all pods and containers.
	Objects() ([]*Pod, []*Container)
	// Update changes the resources of a container, for which it waits for its turn until ctx ends. Of a container to be
	// evicted it begins the stop.
	Update(ctx context.Context, u Update) error
}

// Update is a change of a container's resources that a plugin asks for.
type Update struct {
	ContainerID   string
	Resources     *runtimeapi.LinuxContainerResources // what is zero stays as it is
	Limits        *Limits                             // what CRI has no field for
	IgnoreFailure bool                                // the container that is being created with it is created even if it fails

	Evict  bool   // the container is to be stopped; nothing else is asked of it
	Reason string // of the eviction, in the plugin's words
}

// Empty tells whether the update changes nothing.
func (u Update) Empty() bool { return proto.Size(u.Resources) == 0 && u.Limits == nil && !u.Evict }

// Plugins is the set of plugins. Its methods may be called from several goroutines.
type Plugins struct {
	cfg        Config
	adaptation *adaptation.Adaptation
	runtime    Runtime
	count      atomic.Int32 // of plugins that are registered
	starting   atomic.Bool  // Start has not ended: there may be plugins that are not counted yet

	own *task.Lifetime // of what follows a synchronisation, and of Start's work; Close waits for it
}

// New prepares plugins without starting any. Timeouts and the log belong to the library's
// package, so there is one set of plugins per process.
func New(cfg Config) (*Plugins, error) {
	p := &Plugins{cfg: cfg, own: task.NewLifetime()}
	p.starting.Store(true)
	nrilog.Set(logger{cfg.Log})
	adaptation.SetPluginRegistrationTimeout(cfg.RegistrationTimeout)
	adaptation.SetPluginRequestTimeout(cfg.RequestTimeout)
	options := []adaptation.Option{
		adaptation.WithPluginPath(cfg.PluginDir),
		adaptation.WithPluginConfigPath(cfg.PluginConfigDir),
		adaptation.WithSocketPath(cfg.Socket),
		adaptation.WithMetrics(metrics{p}),
		adaptation.WithDefaultValidator(validatorConfig(cfg)),
		adaptation.WithTTRPCOptions(interceptors()),
	}
	if cfg.Socket == "" {
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

// Start starts the plugins of PluginDir, tells them of everything that rt has, and then accepts
// external ones. A plugin that does not start is passed over and named in the log; each may take the
// registration timeout and two request timeouts. The error is about the directory or the socket, which another runtime
// may own, or that ctx ended; Close must follow then.
func (p *Plugins) Start(ctx context.Context, rt Runtime) error {
	p.runtime = rt
	if err := p.checkSocket(); err != nil {
		return err
	}
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

// checkSocket refuses a socket on which somebody answers: the library would put its own in the
// place of, say, containerd's.
func (p *Plugins) checkSocket() error {
	if p.cfg.Socket == "" {
		return nil
	}
	conn, err := net.DialTimeout("unix", p.cfg.Socket, time.Second)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil // nobody is there
	}
	if err != nil { // somebody may be: one who is busy, for instance
		return errdefs.New(codes.FailedPrecondition, "NRI socket %s may be another runtime's: %w", p.cfg.Socket, err)
	}
	_ = conn.Close() // nothing was sent
	return errdefs.New(codes.FailedPrecondition, "NRI socket %s is another runtime's: set nri_socket, or nri to false", p.cfg.Socket)
}

// closeLimit is what updates under way and programs that were killed may take to end.
const closeLimit = 5 * time.Second

// Close kills the plugins that Start started, accepts no more, and waits a while for updates that plugins asked for when
// they registered. Where Start gave up, its work under way ends with the process.
func (p *Plugins) Close() {
	p.own.Close()
	p.own.Cancel()
	if p.starting.Load() {
		return // the library stops nothing before it has started everything
	}
	p.adaptation.Stop()
	if err := p.own.WaitFor(closeLimit); err != nil {
		p.cfg.Log.Warn("NRI: plugins, or updates that they asked for, do not end and are left behind", "error", err)
	}
}

// Hold keeps plugins that register from being told the state of things until release is called, which must always be.
// Active tells whether there is a plugin at all; if not, there is nobody to tell. It waits
// for a registration under way, which the request timeout bounds. A goroutine must not hold twice.
func (p *Plugins) Hold() (release func(), active bool) {
	defer p.cfg.Waits.Begin("NRI plugins to have registered", "NRI")()
	block := p.adaptation.BlockPluginSync()
	return block.Unblock, p.starting.Load() || p.count.Load() > 0
}

// synchronize tells a new plugin of everything there is. What it asks for in return is done after it
// is registered, for that may need the turn of one who waits for the registration to end.
func (p *Plugins) synchronize(ctx context.Context, tell adaptation.SyncCB) (err error) {
	defer p.recovered("Synchronize", "a new plugin", &err) // the library's goroutine would end the daemon
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
		p.own.Spawn(func() { p.update(p.own.Context(), updates) }) // else the daemon is ending
	}
	return nil
}

// unsolicited makes changes that a plugin asks for on its own account and returns those that failed.
// One that waits for its turn for half of what a plugin may take to answer has failed: the turn's holder may be waiting
// for that plugin.
func (p *Plugins) unsolicited(ctx context.Context, updates []*api.ContainerUpdate) (failed []*api.ContainerUpdate, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.RequestTimeout/2)
	defer cancel()
	failed = p.update(ctx, updates)
	p.evict(ctx)
	return failed, nil
}

// evict carries out the evictions of a plugin's own request. No field of its answer tells of those that fail.
func (p *Plugins) evict(ctx context.Context) {
	asked, collected := ctx.Value(evictionsKey{}).(*evictions)
	if !collected {
		return
	}
	for _, u := range asked.updates() {
		if err := p.guardedUpdate(ctx, u); err != nil {
			p.cfg.Log.Warn("NRI: an eviction failed that a plugin asked for", "container", u.ContainerID, "error", err)
		}
	}
}

// update makes changes and returns those that failed. Containers are changed side by side, so that one whose turn does not
// come keeps no other from its own; what is asked of one container is done in order.
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
		p.cfg.Log.Warn("NRI: an update failed that a plugin asked for", "container", u.GetContainerId(), "error", errs[i])
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

// PodEvent is something that happened, or is about to happen, to a pod.
type PodEvent string

// Events of pods. An error of a plugin about RunPod or UpdatePod fails the request.
const (
	RunPod     PodEvent = "RunPodSandbox"
	UpdatePod  PodEvent = "UpdatePodSandbox"
	PodUpdated PodEvent = "PostUpdatePodSandbox"
	PodStopped PodEvent = "StopPodSandbox"
	PodRemoved PodEvent = "RemovePodSandbox"
)

// Pod tells the plugins of an event.
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

// ContainerEvent is something that happened, or is about to happen, to a container.
type ContainerEvent string

// Events of containers. An error of a plugin about StartContainer fails the start.
const (
	ContainerCreated ContainerEvent = "PostCreateContainer"
	StartContainer   ContainerEvent = "StartContainer"
	ContainerStarted ContainerEvent = "PostStartContainer"
	ContainerUpdated ContainerEvent = "PostUpdateContainer"
	ContainerStopped ContainerEvent = "StopContainer"
	ContainerRemoved ContainerEvent = "RemoveContainer"
)

// Container tells the plugins of an event. When a container has stopped they may ask for updates of others.
func (p *Plugins) Container(ctx context.Context, event ContainerEvent, pod *Pod, c *Container) ([]Update, error) {
	sandbox, container := pod.api(), c.api()
	var updates []*api.ContainerUpdate
	err := p.relay(ctx, string(event), c.ID, func() error {
		switch event {
		case ContainerCreated:
			return p.adaptation.PostCreateContainer(ctx, &api.PostCreateContainerRequest{Pod: sandbox, Container: container})
		case StartContainer:
			return p.adaptation.StartContainer(ctx, &api.StartContainerRequest{Pod: sandbox, Container: container})
		case ContainerStarted:
			return p.adaptation.PostStartContainer(ctx, &api.PostStartContainerRequest{Pod: sandbox, Container: container})
		case ContainerUpdated:
			return p.adaptation.PostUpdateContainer(ctx, &api.PostUpdateContainerRequest{Pod: sandbox, Container: container})
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

// CreateContainer asks the plugins how a container that is being made is to be changed, its limits
// included, and which others are to be changed or evicted with it.
//
// Errors: Aborted for a plugin's refusal, or plugins that contradict each other; Unimplemented and
// InvalidArgument as Check tells.
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

// addRemovals adds to an adjustment that plugins removed variables, which the library (0.12.5) leaves out. It
// does note what it shows to the plugin after the last one.
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

// UpdateContainer asks the plugins how an update of a container is to be changed, and which
// others are to be changed or evicted with it. It returns what is to be changed of the container now.
func (p *Plugins) UpdateContainer(ctx context.Context, pod *Pod, c *Container, wanted *runtimeapi.LinuxContainerResources) (Update, []Update, error) {
	own := Update{ContainerID: c.ID, Resources: wanted}
	ctx, evicted := withEvictions(ctx)
	var response *api.UpdateContainerResponse
	err := p.relay(ctx, "UpdateContainer", c.ID, func() (err error) {
		response, err = p.adaptation.UpdateContainer(ctx, &api.UpdateContainerRequest{Pod: pod.api(), Container: c.api(), LinuxResources: fromCRI(wanted)})
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

// relay makes one request to the plugins. A panic of the library, which works on what plugins
// answer, is an error of this request.
func (p *Plugins) relay(ctx context.Context, request, object string, do func() error) (err error) {
	defer p.recovered(request, object, &err)
	defer p.cfg.Waits.Begin("NRI plugins to answer "+request, object)()
	if err = do(); err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("NRI %s of %s: %w", request, object, err)
	}
	// Not the plugin's own code, nor that of its timeout: to kubelet a NotFound, say, would be the container's.
	return errdefs.New(codes.Aborted, "NRI %s of %s: %w", request, object, err)
}

// recovered, when deferred, turns a panic into an error.
func (p *Plugins) recovered(request, object string, err *error) {
	if r := recover(); r != nil {
		p.cfg.Log.Error("panic", "operation", "NRI "+request, "object", object, "panic", r, "stack", string(debug.Stack()))
		*err = errdefs.Internal("NRI %s of %s: internal error: %v", request, object, r)
	}
}

// metrics keeps the number of plugins, which the library tells nobody else.
type metrics struct{ p *Plugins }

func (m metrics) UpdatePluginCount(n int) {
	if before := m.p.count.Swap(int32(n)); int(before) != n {
		m.p.cfg.Log.Info("NRI: plugins came or went", "plugins", n, "before", before)
	}
}

func (metrics) RecordPluginInvocation(string, string, error)                               {}
func (metrics) RecordPluginLatency(string, string, time.Duration)                          {}
func (metrics) RecordPluginAdjustments(string, string, *api.ContainerAdjustment, int, int) {}

// logger passes on what the library logs. Its steps are of interest to who looks for trouble.
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
			level = slog.LevelDebug // left out on purpose, see contrib/build
		}
	}
	if l.log.Enabled(ctx, level) {
		l.log.Log(ctx, level, "NRI: "+fmt.Sprintf(format, args...))
	}
}
