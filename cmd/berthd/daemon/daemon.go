// Package daemon is the program berthd.
//
// # Contract
//
// [Main] reads the configuration and opens the parts of the daemon in the order of their
// dependencies. It serves CRI until a signal, and closes the parts in reverse order. A reload
// changes the options that a running daemon can take.
//
// The program berth uses the rest of the package without a daemon: [Check] for "berth config
// check", [Registries] for "berth check", and [Offline] for "berth reset".
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	systemd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"berth/cmd/berthd/exporter"
	"berth/cmd/berthd/memory"
	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni"
	"berth/cni/berthnet"
	"berth/image"
	"berth/image/governor"
	"berth/image/layer"
	"berth/image/pull"
	"berth/image/unpack"
	"berth/image/unpack/process"
	"berth/internal/cleanup"
	"berth/internal/host"
	"berth/internal/lockfile"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/internal/version"
	"berth/oci"
	"berth/oci/confine"
	"berth/sandbox"
	"berth/sandbox/ownership"
	"berth/sandbox/state"
	"berth/sandbox/stream"
	"berth/server"
	"berth/server/sessions"
)

// setUpProcess sets process attributes that must not depend on the parent process.
func setUpProcess() {
	unix.Umask(0o022) // berth sets modes that matter to containers explicitly
	// The daemon must survive a log without a reader. SIGPIPE is caught and not ignored, because
	// containers would inherit an ignored signal. execve resets caught signals.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	// The heap is small and mostly idle. Collecting twice as often as Go's default costs no
	// noticeable CPU and halves the garbage.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// serve runs the daemon from start to end. It closes its parts in reverse order.
func serve(ctx context.Context, cfg *config.Config, reload *reloader, names *sandbox.Names,
	log *slog.Logger) (err error) {
	a := newAssembly(cfg, log)
	a.names = names
	defer a.closing.Run(&err)
	// The limit of the shutdown starts with the signal, or with the first part that closes.
	defer context.AfterFunc(ctx, func() { a.shutdown.deadline() })()

	a.closing.Add("stop watching signals", watchSignals(os.Stderr, reload.request, log))
	budget := memory.SetLimit(log)
	if err := a.takeDirectories(ownership.Claim); err != nil {
		return err
	}
	on, err := a.openSockets()
	if err != nil {
		return err
	}
	n, err := node.Discover(cfg)
	if err != nil {
		return err
	}
	a.watchWaits()
	p, err := a.openParts(ctx, n, budget)
	if err != nil {
		return err
	}
	a.serveCadvisor(on.cadvisor, p.pods, images{p.images.Store(), p.images})
	a.openPeers(p.images)
	preload := func(ctx context.Context) { p.images.Preload(ctx, cfg.PreloadDirs) }
	a.closing.Add("stop loading images", whileServing(preload))
	a.metrics.Watch(p.pods, p.images.Store(), a.waits, a.cfg.Root)
	srv := a.newServer(n, p, reload.settings)
	reload.use(p, a)
	a.closing.Add("stop reloading", whileServing(reload.run))
	return a.announce(ctx, on.cri, srv)
}

// sockets are the sockets of the daemon's gRPC services.
type sockets struct {
	cri      net.Listener
	cadvisor net.Listener // nil: none is configured
}

// openSockets opens all sockets, and serves metrics early, to inspect a daemon that hangs during
// its start.
func (a *assembly) openSockets() (on sockets, err error) {
	if on.cri, err = listen(a.cfg.Listen); err != nil {
		return on, err
	}
	a.closing.Add("close socket", func() error { return ignoreClosed(on.cri.Close()) })
	if own := on.cri.Addr().String(); own != a.cfg.Listen {
		a.log.Warn("berth.socket decides where the daemon listens: set ListenStream= to the option listen",
			"socket", own, "listen", a.cfg.Listen)
	}
	if err := a.serveMetrics(); err != nil {
		return on, err
	}
	on.cadvisor, err = a.listenForCadvisor()
	return on, err
}

// parts are the parts of the daemon that its services use.
type parts struct {
	images   *pull.Puller
	network  *cni.Network
	tracing  server.Tracing
	plugins  *nri.Plugins     // nil: NRI is off
	events   *server.EventLog // nil: offline
	pods     *sandbox.Manager
	sessions *sessions.Sessions
}

// openParts opens the parts in the order of their dependencies.
func (a *assembly) openParts(ctx context.Context, n *node.Node, budget memory.Budget) (p parts, err error) {
	if err := checkSeccomp(a.cfg); err != nil {
		return p, err
	}
	if p.images, err = a.openImages(ctx, n, budget); err != nil {
		return p, err
	}
	if p.network, err = a.openNetwork(); err != nil {
		return p, err
	}
	if p.tracing, err = startTracing(a.cfg, a.shutdown, a.closing, a.log); err != nil {
		return p, err
	}
	if p.plugins, err = newPlugins(a.cfg, a.waits, a.log); err != nil {
		return p, err
	}
	p.events = server.OpenEventLog(dirs(a.cfg).Events(), a.log)
	if p.pods, err = a.openPods(ctx, n, p); err != nil {
		return p, err
	}
	p.sessions, err = a.openSessions(n, p.pods)
	return p, err
}

// newServer returns the CRI server. settings returns the present configuration for verbose Status.
func (a *assembly) newServer(n *node.Node, p parts, settings func() any) *server.Server {
	trimmer := memory.NewIdleTrimmer(restTime, memory.Release, a.log)
	a.closing.Add("stop the idle trimmer", trimmer.Close)
	cfg := serverConfig(settings, n, p.network, p.sessions, p.tracing, a.waits)
	facts := p.pods.HostFacts()
	cfg.UserNamespaces, cfg.PulledSeccomp, cfg.CgroupMounts = facts.UserNamespaces, facts.Seccomp, facts.NSDelegate
	cfg.Changing = trimmer.Changing
	cfg.Observer = a.metrics
	cfg.Names, cfg.Events = a.names.Of, p.events
	return server.New(cfg, p.pods, images{p.images.Store(), p.images}, a.log)
}

// assembly has the parts of the daemon that are open. closing closes them in reverse order, within
// the time of shutdown.
type assembly struct {
	cfg      *config.Config
	shutdown shutdown
	closing  *cleanup.List
	waits    *task.Waits // all waits of the daemon; nil before watchWaits
	metrics  *exporter.Exporter
	unpacker *process.Program                // nil before openImages
	servers  *exporter.Servers               // nil before serveMetrics
	pods     atomic.Pointer[sandbox.Manager] // nil before openPods; read by pulls
	names    *sandbox.Names
	log      *slog.Logger
}

func newAssembly(cfg *config.Config, log *slog.Logger) *assembly {
	return &assembly{
		cfg:      cfg,
		shutdown: newShutdown(stopTimeout),
		closing:  cleanup.New(),
		metrics:  exporter.New(version.Get()),
		log:      log,
	}
}

// serveMetrics serves metrics and profiles until the daemon ends.
func (a *assembly) serveMetrics() error {
	a.metrics.SetGroups(a.cfg.MetricsCollectors)
	servers, err := a.metrics.Listen(a.cfg.State, a.cfg.MetricsAddress, a.log)
	if err != nil {
		return err
	}
	a.closing.Add("close metrics server", servers.Close)
	a.servers = servers
	return nil
}

// watchWaits creates the set of waits and starts its watch.
func (a *assembly) watchWaits() {
	a.waits = &task.Waits{}
	a.waits.SetLimit(a.cfg.WaitLimit.Duration)
	a.closing.Add("stop watching waits", whileServing(func(ctx context.Context) { a.waits.Watch(ctx, a.log) }))
}

// whileServing starts a goroutine and returns the function that cancels it and waits for its end.
func whileServing(run func(context.Context)) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	return func() error {
		cancel()
		running.Wait()
		return nil
	}
}

// openImages opens the image store and the program that unpacks layers.
func (a *assembly) openImages(ctx context.Context, n *node.Node, budget memory.Budget) (*pull.Puller, error) {
	unpacker, err := process.Open(n.Unpack, a.cfg.StallTimeout.Duration, a.log)
	if err != nil {
		return nil, err
	}
	a.closing.Add("close berth-unpack", unpacker.Close)
	a.unpacker = unpacker
	imageCfg := imageConfig(a.cfg, unpacker, budget, a.waits)
	imageCfg.Observer = a.metrics
	imageCfg.Governor.Pressure = a.podPressure
	if imageCfg.Lazy, err = a.lazyConfig(budget); err != nil {
		return nil, err
	}
	images, err := pull.Open(ctx, imageCfg, a.log)
	if err != nil {
		return nil, err
	}
	a.closing.Add("close image store", a.shutdown.closer(images.Close))
	return images, nil
}

// openNetwork opens the pods' network.
func (a *assembly) openNetwork() (*cni.Network, error) {
	own := &berthnet.Plugin{Log: a.log}
	a.closing.Add("close berth-net", a.shutdown.closer(own.Close))
	networkCfg, err := node.NetworkConfig(a.cfg, own)
	if err != nil {
		return nil, err
	}
	isOwn := a.cfg.Network == node.OwnNetwork
	if isOwn {
		if err := own.Open(); err != nil { // verbose Status reports it too
			a.log.Warn("the built-in network is not usable", "error", err)
		}
	}
	networkCfg.RunDir, networkCfg.Waits, networkCfg.Ran = node.CNIRunDir(a.cfg), a.waits, a.metrics.PluginRan
	if !isOwn {
		networkCfg.Ran = a.retireOwnNetwork()
	}
	network, err := cni.New(networkCfg, a.log)
	if err != nil {
		return nil, err
	}
	a.closing.Add("close network", a.shutdown.closer(func() error { network.Close(); return nil }))
	return network, nil
}

// retireOwnNetwork removes what an earlier configuration's built-in network has left on the node,
// as soon as no pod uses it. The caller calls the returned function after each run of a plugin.
func (a *assembly) retireOwnNetwork() (ran func(plugin, verb string, took time.Duration, err error)) {
	released := make(chan struct{}, 1)
	released <- struct{}{} // the last pod may have ended before this start
	retire := func(ctx context.Context) {
		for {
			select {
			case <-ctx.Done():
				return
			case <-released:
			}
			removed, err := berthnet.Retire(ctx, node.OwnNet(a.cfg))
			switch {
			case err != nil && ctx.Err() == nil:
				a.log.Warn("remove the built-in network, which is not configured any more", "error", err)
			case len(removed) > 0:
				a.log.Info("removed the built-in network: it is not configured any more, and no pod uses it",
					"parts", strings.Join(removed, ", "))
			}
		}
	}
	a.closing.Add("stop removing the built-in network", whileServing(retire))
	return func(plugin, verb string, took time.Duration, err error) {
		a.metrics.PluginRan(plugin, verb, took, err)
		if plugin == berthnet.Type && verb == "DEL" {
			select {
			case released <- struct{}{}:
			default: // a release is pending
			}
		}
	}
}

// openPods restores all pods and containers, and then deletes layers that no container needs.
func (a *assembly) openPods(ctx context.Context, n *node.Node, p parts) (*sandbox.Manager, error) {
	cfg, puller := sandboxConfig(a.cfg, n, a.waits, a.log), p.images
	cfg.Names = a.names
	if p.events != nil {
		cfg.Told = p.events.Told()
	}
	cfg.Observer, cfg.Unpacker, cfg.LayersLost = a.metrics, a.unpacker, puller.Store().Lazy().Lost()
	if p.plugins != nil { // if the pointer is nil, the interface must be nil, too
		cfg.Plugins = p.plugins
	}
	cfg.Defaults.Seccomp.Pulled = puller.Profiles().Get
	cfg.PullPause = func(ctx context.Context, ref string) (*image.Image, error) { return puller.Pull(ctx, ref, nil) }
	images := puller.Store()
	pods, err := sandbox.Open(ctx, cfg, images, p.network)
	if err != nil {
		return nil, err
	}
	a.closing.Add("close sandboxes", a.shutdown.within(pods.Close))
	a.pods.Store(pods)
	images.OnWrongFiles(pods.KillOnLayer)
	if err := images.CollectGarbage(ctx); err != nil { // unused layers do no harm
		a.log.Error("collect unused layers, which stay until the next deletion", "error", err)
	}
	return pods, nil
}

// listenForCadvisor listens on the socket for cAdvisor, early, because another runtime may own it.
// It returns nil if none is configured.
func (a *assembly) listenForCadvisor() (net.Listener, error) {
	if a.cfg.CadvisorSocket == "" {
		return nil, nil
	}
	l, err := server.ListenForCadvisor(a.cfg.CadvisorSocket)
	if err != nil {
		return nil, err
	}
	a.closing.Add("close socket for cAdvisor", func() error { return ignoreClosed(l.Close()) })
	return l, nil
}

// serveCadvisor serves cAdvisor on l until the daemon ends.
func (a *assembly) serveCadvisor(l net.Listener, pods *sandbox.Manager, from images) {
	if l == nil {
		return
	}
	cfg := server.CadvisorConfig{Version: version.Get(), PauseImage: a.cfg.PauseImage}
	srv := server.NewCadvisor(cfg, pods, from, a.log)
	stop := whileServing(func(context.Context) {
		if err := srv.Serve(l); err != nil {
			a.log.Error("cAdvisor socket failed, restart berth to serve it again", "error", err)
		}
	})
	a.closing.Add("stop serving cAdvisor", func() error {
		srv.Stop()
		return stop()
	})
}

// announce serves CRI, and notifies systemd of its start and end.
func (a *assembly) announce(ctx context.Context, listener net.Listener, srv *server.Server) error {
	a.log.Info("serving", "version", version.Get(), "socket", listener.Addr().String())
	notify(a.log, systemd.SdNotifyReady)
	defer startWatchdog(ctx, listener, a.waits, a.metrics.WatchdogChecked, a.log)()
	stop := context.AfterFunc(ctx, func() {
		a.log.Info("stopping, containers keep running")
		notify(a.log, systemd.SdNotifyStopping)
	})
	defer stop()
	return srv.Serve(ctx, listener)
}

func notify(log *slog.Logger, state string) {
	if _, err := systemd.SdNotify(false, state); err != nil {
		log.Warn("notify systemd", "state", state, "error", err)
	}
}

// takeDirectories locks the root and state directories. claim refuses them if they do not belong to
// the node's pods. No other file is read or written before.
func (a *assembly) takeDirectories(claim func(state.Dirs, *slog.Logger) error) error {
	if err := lockDirectories(a.cfg, a.closing); err != nil {
		return err
	}
	return claim(dirs(a.cfg), a.log)
}

func dirs(cfg *config.Config) state.Dirs {
	return state.Dirs{Root: cfg.Root, State: cfg.State, NetNSs: cfg.NetNSDir}
}

// lockDirectories creates the root and state directories and locks them against other daemons.
func lockDirectories(cfg *config.Config, closing *cleanup.List) error {
	for _, dir := range []string{cfg.Root, cfg.State} {
		if err := privateDir(dir); err != nil {
			return err
		}
		lock, err := lockfile.Acquire(filepath.Join(dir, "lock"))
		if err != nil {
			return fmt.Errorf("another berth uses %s: %w", dir, err)
		}
		closing.Add("unlock "+dir, lock.Release)
	}
	return nil
}

// privateDir creates dir with access for root only (CVE-2024-25621). It does not modify a correct
// directory, because the filesystem may have become read-only.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create directory: %w", err)
	}
	if info, err := os.Stat(dir); err == nil && info.Mode() == os.ModeDir|0o700 {
		return nil
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("make directory private: %w", err)
	}
	return nil
}

// listen returns the socket that systemd passes, or creates one at path.
func listen(path string) (net.Listener, error) {
	passed, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("take sockets from systemd: %w", err)
	}
	switch len(passed) {
	case 0:
		return server.Listen(path)
	case 1:
		if l, ok := passed[0].(*net.UnixListener); ok {
			return l, nil
		}
		return nil, errors.New("the socket from systemd is not a unix stream socket")
	default:
		return nil, fmt.Errorf("systemd passed %d sockets, want one", len(passed))
	}
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func imageConfig(cfg *config.Config, u *process.Program, budget memory.Budget, waits *task.Waits) pull.Config {
	return pull.Config{
		Root:        filepath.Join(cfg.Root, "images"),
		Unpack:      u.Unpack,
		Pack:        u.Pack,
		Profile:     u.CheckProfile,
		MergeMemory: budget.MergeMemory(),
		WorkMemory:  budget.WorkMemory(),
		Driver:      cfg.LayerDriver,
		Limits: unpack.Limits{
			Tar:     int64(cfg.MaxLayerBytes),
			Bytes:   int64(cfg.MaxLayerBytes),
			Entries: int64(cfg.MaxLayerEntries),
		},
		Reserve:              layer.Reserve{Percent: cfg.DiskReservePercent, Bytes: int64(cfg.DiskReserveBytes)},
		Settings:             imageSettings(cfg),
		MaxParallelDownloads: cfg.MaxParallelDownloads,
		MaxUnpacking:         budget.Unpackers(),
		MaxRangeRequests:     budget.RangeRequests(cfg.MaxRangeRequests),
		StallTimeout:         cfg.StallTimeout.Duration,
		PartialTTL:           cfg.PartialLayerTTL.Duration,
		Governor: governor.Config{
			Bandwidth: int64(cfg.PullBandwidth), Rise: float64(cfg.PullPressureLimit) / 100,
		},
		IndexBytes: indexBytes(cfg),
		Waits:      waits,
	}
}

// newPlugins returns nil if NRI is off.
func newPlugins(cfg *config.Config, waits *task.Waits, log *slog.Logger) (*nri.Plugins, error) {
	if !cfg.NRI {
		return nil, nil
	}
	return nri.New(nri.Config{
		Version:             version.Get(),
		Waits:               waits,
		Socket:              cfg.NRISocket,
		PluginDir:           cfg.NRIPluginDir,
		PluginConfigDir:     cfg.NRIPluginConfigDir,
		RegistrationTimeout: cfg.NRIRegistrationTimeout.Duration,
		RequestTimeout:      cfg.NRIRequestTimeout.Duration,
		Reject:              cfg.NRIReject,
		RequiredPlugins:     cfg.NRIRequiredPlugins,
		Log:                 log,
	})
}

func sandboxConfig(cfg *config.Config, n *node.Node, waits *task.Waits, log *slog.Logger) sandbox.Config {
	return sandbox.Config{
		Root:           cfg.Root,
		State:          cfg.State,
		NetNSDir:       cfg.NetNSDir,
		HostResolvConf: func() string { return host.ResolvConf("/") },
		SystemdCgroup:  n.SystemdCgroup,
		Handler:        config.BuiltinHandler,
		Handlers:       node.Handlers(cfg),
		DefaultHandler: cfg.DefaultHandler,
		PauseImage:     cfg.PauseImage,
		ShimPath:       n.Shim,
		IdleLaunchers:  cfg.IdleLaunchers,
		MaxLogLine:     cfg.MaxLogLine,
		SamplePeriod:   cfg.StatsPeriod.Duration,
		LayerLimit:     uint64(cfg.WritableLayerLimit),
		LayerProjects:  uint32(cfg.WritableLayerProjects),
		Streams: stream.Limits{
			Execs:             cfg.MaxExecs,
			ExecsPerContainer: cfg.MaxContainerExecs,
			Sessions:          cfg.MaxSessions,
		},
		Host:       n.Facts,
		CDI:        cfg.CDISpecDirs,
		OwnDevices: cfg.DeviceOwnership,
		Defaults:   containerDefaults(cfg),
		PauseCPUs:  cfg.PauseCPUs,

		IgnoreVolumes: cfg.ImageVolumes == "ignore",

		CRIU:     cfg.CheckpointCRIU,
		Restores: state.RestoreMode(cfg.CheckpointRestore),

		Waits:     waits,
		Log:       log,
		LogFormat: cfg.LogFormat,
	}
}

// containerDefaults returns the options about all containers of a valid configuration.
func containerDefaults(cfg *config.Config) oci.Defaults {
	limits, _ := cfg.Rlimits() // they have been validated
	return oci.Defaults{
		Env: cfg.DefaultEnv, Rlimits: limits,
		Seccomp: confine.SeccompDefaults{File: cfg.DefaultSeccomp, Unset: cfg.UnsetSeccomp == "runtime/default"},
	}
}

func serverConfig(settings func() any, n *node.Node, network *cni.Network, streams server.Sessions,
	tracing server.Tracing, waits *task.Waits) server.Config {
	return server.Config{
		Version:       version.Get(),
		SystemdCgroup: n.SystemdCgroup,
		Settings:      settings,
		Network:       network.Info,
		PassedLimit:   waits.PassedLimit,
		Sessions:      streams,
		Tracing:       tracing,
	}
}

// restTime is the time without changes after which the daemon releases unused memory. It is long
// enough that successive requests still find warm caches and pages.
const restTime = 3 * time.Second

// images has the image store and the Puller, for the server.
type images struct {
	*image.Store
	*pull.Puller
}
