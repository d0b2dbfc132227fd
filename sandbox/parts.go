package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"

	"berth/checkpoint/process/archive"
	"berth/cni"
	"berth/image"
	"berth/internal/cgroup"
	"berth/internal/cleanup"
	"berth/internal/host"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/internal/trash"
	"berth/sandbox/handler"
	"berth/sandbox/lsm"
	"berth/sandbox/podenv"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/payload"
)

// parts are the parts of a manager that need the host: its files, processes and kernel. Tests
// replace them with fakes.
type parts struct {
	node   state.Node
	bootID string
	run    state.Run // of the state directory

	launcher  Starter
	processes Processes
	stopper   Stopper
	dumper    Dumper
	images    Images
	imageRoot string // directory of the image store
	volumes   Volumes
	restores  Restores
	network   Network
	podenv    Environment
	records   Records
	trash     Trash
	pool      Pool
	launchers *shim.Launchers // pool, for streams; nil in tests
	quotas    *runtime.Quotas // nil where quotas are off
	handlers  *handler.Set
	appArmor  *lsm.AppArmor
	selinux   lsm.SELinux
	key       func() (*archive.Key, error) // the node's key for checkpoints, made when it is first needed
}

// openParts prepares the host's directories and opens the parts. The only processes that it starts
// are idle launchers. If it fails, it stops them.
func openParts(
	ctx context.Context, cfg Config, images *image.Store, network *cni.Network, tasks *task.Runner,
) (_ *parts, err error) {
	undo := cleanup.New()
	defer undo.Run(&err)
	p := &parts{node: newNode(cfg), images: images, imageRoot: images.Root(), selinux: lsm.HostSELinux}
	if err := cgroup.Prepare(); err != nil {
		return nil, err
	}
	if p.bootID, err = host.BootID(); err != nil {
		return nil, err
	}
	if p.run, err = openRun(p.node.Dirs, cfg.Log); err != nil {
		return nil, err
	}
	if err := p.node.Prepare(); err != nil {
		return nil, err
	}
	if p.quotas, err = runtime.OpenQuotas(p.node.Writable(""), cfg.LayerLimit, cfg.LayerProjects); err != nil {
		return nil, err
	}
	undo.Add("close quotas", p.quotas.Close)
	if p.records, err = state.OpenRecords(cfg.Root, tasks.Begin); err != nil {
		return nil, err
	}
	networks, err := podenv.OpenNetworks(network, cfg.Root, tasks, cfg.Log)
	if err != nil {
		return nil, err
	}
	programs, err := payload.Install(filepath.Join(cfg.Root, "bin"))
	if err != nil {
		return nil, fmt.Errorf("install pause and monitor: %w", err)
	}
	if p.launchers, err = startPool(cfg, p.node.Dirs, programs); err != nil {
		return nil, err
	}
	undo.Add("end idle launchers", p.launchers.Close)
	namespaces := podenv.Namespaces{Dirs: p.node.Dirs, Holder: programs.Pause + payload.PauseProgram}
	p.node.Host = probeUserNamespaces(namespaces, cfg)
	p.handlers, err = handler.Open(ctx, handler.Options{
		BuiltIn:  cfg.Handler,
		Programs: cfg.Handlers,
		Default:  cfg.DefaultHandler,
		Host:     p.node.Host,
		Tasks:    tasks,
		Log:      cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	p.makePods(cfg, images, networks, namespaces, tasks)
	p.makeContainers(cfg, images, programs, tasks)
	undo.Release()
	return p, nil
}

// newNode returns the node of a configuration. probeUserNamespaces completes its facts.
func newNode(cfg Config) state.Node {
	return state.Node{
		Dirs:          state.Dirs{Root: cfg.Root, State: cfg.State, NetNSs: cfg.NetNSDir},
		Host:          cfg.Host,
		SystemdCgroup: cfg.SystemdCgroup,
		OwnDevices:    cfg.OwnDevices,
		Defaults:      cfg.Defaults,
		CDI:           cfg.CDI,
		PauseCPUs:     cfg.PauseCPUs,
		CRIU:          cfg.CRIU,
	}
}

// makePods makes the parts that make the environments of pods.
func (p *parts) makePods(
	cfg Config, images *image.Store, networks *podenv.Networks, namespaces podenv.Namespaces, tasks *task.Runner,
) {
	bin := trash.New(p.node.Trash(), safefs.RemoveAll, tasks, cfg.Log)
	p.trash, p.network = bin, networks
	p.podenv = podenv.Provisioner{
		Dirs:           p.node.Dirs,
		HostResolvConf: cfg.HostResolvConf,
		Log:            cfg.Log,
		Namespaces:     namespaces,
		Networks:       networks,
		SELinux:        p.selinux,
		Images:         images,
		Trash:          bin,
	}
}

// makeContainers makes the parts that run, stop, save and restore pauses and containers.
func (p *parts) makeContainers(cfg Config, images *image.Store, programs payload.Paths, tasks *task.Runner) {
	p.key = loadOnce(func() (*archive.Key, error) { return archive.LoadKey(p.node.Root) })
	p.appArmor = lsm.NewAppArmor(p.node.Host.AppArmor, tasks, cfg.Log)
	roots := runtime.Roots{Images: images, PullPause: cfg.PullPause, Dirs: p.node.Dirs, Quotas: p.quotas}
	processes := runtime.Processes{Node: p.node, Tasks: tasks, Log: cfg.Log}
	p.pool, p.volumes, p.processes, p.stopper = p.launchers, roots, processes, runtime.NewStopper(processes)
	p.dumper = runtime.Dumper{Node: p.node, Launchers: p.launchers, Log: cfg.Log}
	p.restores = runtime.Restores{Dirs: p.node.Dirs, Key: p.key, Unpacker: cfg.Unpacker}
	p.launcher = runtime.Launcher{
		Node:          p.node,
		Roots:         roots,
		Users:         new(runtime.Users),
		AppArmor:      p.appArmor,
		SELinux:       p.selinux,
		Sources:       runtime.NewSources(tasks),
		Launchers:     p.launchers,
		PauseDir:      programs.Pause,
		MaxLogLine:    cfg.MaxLogLine,
		Unpacker:      cfg.Unpacker,
		IgnoreVolumes: cfg.IgnoreVolumes,
		Tasks:         tasks,
		Log:           cfg.Log,
	}
}

// openRun opens the run of the state directory (see state.Run).
func openRun(dirs state.Dirs, log *slog.Logger) (state.Run, error) {
	run, err := dirs.OpenRun()
	if err == nil && run.ID == "" {
		log.Warn("write the ID of the state directory: the filesystem is full or read-only; until it is written, restarts with the same boot ID are not noticed",
			"path", dirs.RunID())
	}
	return run, err
}

// startPool starts the idle launchers.
func startPool(cfg Config, dirs state.Dirs, programs payload.Paths) (*shim.Launchers, error) {
	return shim.New(shim.Config{
		ShimPath:    cfg.ShimPath,
		MonitorPath: programs.Monitor,
		StateRoot:   dirs.Libcontainer(),
		Idle:        cfg.IdleLaunchers,
		Warm:        cfg.Host.RootShared,
		Log:         cfg.Log,
		LogFormat:   cfg.LogFormat,

		SystemdCgroup: cfg.SystemdCgroup,
	})
}

// probeUserNamespaces completes the node's facts with the result of probing user namespaces. It
// runs before any part of the manager gets the facts, which do not change afterwards.
func probeUserNamespaces(namespaces podenv.Namespaces, cfg Config) host.Facts {
	err := namespaces.Probe()
	if err != nil {
		cfg.Log.Warn("pods cannot have user namespaces", "error", err)
	}
	return cfg.Host.WithUserNamespaces(err)
}

// loadOnce returns a function that calls load until load succeeds once. After that, the function
// returns the result of that call.
func loadOnce[T any](load func() (*T, error)) func() (*T, error) {
	var mu sync.Mutex // held during load, so that there is one call at a time
	var loaded *T
	return func() (*T, error) {
		mu.Lock()
		defer mu.Unlock()
		if loaded != nil {
			return loaded, nil
		}
		value, err := load()
		if err == nil {
			loaded = value
		}
		return value, err
	}
}
