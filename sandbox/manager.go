package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"berth/checkpoint/archive"
	"berth/cni"
	"berth/image"
	"berth/internal/cgroup"
	"berth/internal/cleanup"
	"berth/internal/diskusage"
	"berth/internal/host"
	"berth/internal/lograte"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/internal/trash"
	"berth/oci"
	"berth/sandbox/handler"
	"berth/sandbox/history"
	"berth/sandbox/lsm"
	"berth/sandbox/podenv"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	"berth/sandbox/stream"
	"berth/shim"
	"berth/shim/payload"
)

// Config holds the daemon's settings for all pods.
type Config struct {
	Root           string                    // durable state: records, pod files, writable layers; survives a reboot
	State          string                    // state of the current boot: shim directories, the pods' shm
	NetNSDir       string                    // where network namespaces are pinned, /run/netns
	HostResolvConf func() string             // path of the resolv.conf of pods with the Default DNS policy
	SystemdCgroup  bool                      // cgroup driver: systemd, else cgroupfs
	Names          *Names                    // gets the objects; may be nil
	Handler        string                    // name of the built-in runtime handler
	Handlers       map[string]handler.Config // the other runtime handlers
	DefaultHandler string                    // the handler of pods that name none; empty: Handler
	PauseImage     string                    // image to use instead of the embedded pause; empty: none
	ShimPath       string                    // the berth-shim binary
	IdleLaunchers  int                       // launchers kept ready
	MaxLogLine     int                       // bytes before a log line is split as partial
	Plugins        Plugins                   // nil: none
	SamplePeriod   time.Duration             // between two measurements of a container's writable layer
	LayerLimit     uint64                    // maximum bytes of a container's writable layer; 0: no limit
	LayerProjects  uint32                    // the first quota project ID of writable layers
	Streams        stream.Limits             // limits of concurrent streams
	Host           host.Facts                // from host.Detect
	CDI            runtime.CDIDirs           // directories of CDI device specs
	CRIU           string                    // path of CRIU; empty: found in PATH
	TrustRestores  bool                      // CRIU may restore processes, which it trusts with root on the node
	Unpacker       runtime.Unpacker          // berth-unpack
	OwnDevices     bool                      // devices belong to the user and group of the security context
	Defaults       oci.Defaults              // of all containers
	PauseCPUs      string                    // CPUs of pauses; empty: all
	IgnoreVolumes  bool                      // VOLUMEs of images have no effect
	LayersLost     bool                      // containers on layers that are still incomplete read zeros: they are killed
	Waits          *task.Waits               // lists the waits of operations
	Observer       Observer                  // nil: none
	Log            *slog.Logger
	LogFormat      string // of Log: json or text
}

// Manager owns all pods and containers.
type Manager struct {
	*state.Lists[*pod, *container] // Pods, Containers, Events
	*stream.Service                // Exec, ExecSync, Attach, PortForward
	*stats.Reader                  // ContainerStats, PodStats
	*control                       // all pods and containers, by ID

	cfg    Config
	log    *slog.Logger
	bootID string
	run    state.Run // of the state directory
	dirs   state.Dirs

	launcher  Launcher
	processes Processes
	dumper    Dumper
	images    Images
	volumes   Volumes
	restores  Restores
	network   Network
	podenv    Environment
	trash     Trash
	pool      Pool
	quotas    *runtime.Quotas // nil where quotas are off
	plugins   pluginCaller
	handlers  *handler.Set
	appArmor  *lsm.AppArmor
	selinux   lsm.SELinux
	labels    lsm.Holders
	history   *history.History             // nil in tests
	signing   func() (*archive.Key, error) // the node's key for checkpoints, made when it is first needed

	outputs      outputs     // directories of pods' checkpoints
	undoing      atomic.Bool // the checkpoints of an earlier daemon are not undone yet
	podIDs       creations   // by (namespace, name, uid, attempt)
	containerIDs creations   // by (pod, name, attempt)
	sampler      *stats.Sampler
	unmeasured   lograte.Limiter // rate limit of warnings about usage that cannot be read
	oomKills     oomCounter
	unfinished   *deferredWork // found by recover
	disks        writableWatch // of root and state
}

// closeLimit bounds Close after Open failed, when no operation runs.
const closeLimit = 5 * time.Second

// Open prepares the state directories, loads all records, adopts running containers, and continues
// the unfinished operations of an earlier daemon. The daemon holds the locks of root and state.
func Open(ctx context.Context, cfg Config, images *image.Store, network *cni.Network) (*Manager, error) {
	m, err := newManager(ctx, cfg, images, network)
	if err != nil {
		return nil, err
	}
	if m.host.OOMScoreAdjMin > pauseOOMScore {
		m.log.Warn("the kernel refuses to lower oom_score_adj (CAP_SYS_RESOURCE is missing): pods and containers get the lowest value allowed",
			"wanted", pauseOOMScore, "lowest", m.host.OOMScoreAdjMin)
	}
	m.appArmor.Ensure(ctx)
	if err := m.start(ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
		defer cancel()
		return nil, errors.Join(err, m.Close(ctx))
	}
	return m, nil
}

// newManager prepares the host and assembles the manager. It starts nothing but idle launchers.
func newManager(ctx context.Context, cfg Config, images *image.Store, network *cni.Network) (*Manager, error) {
	tasks := task.NewRunner(cfg.Log, cfg.Waits)
	parts, err := openParts(ctx, cfg, network, tasks)
	if err != nil {
		return nil, err
	}
	return wireManager(cfg, images, parts, tasks), nil
}

// hostParts are the parts of a manager that need the host: its files, processes and kernel.
type hostParts struct {
	dirs       state.Dirs
	bootID     string
	run        state.Run
	quotas     *runtime.Quotas
	records    *state.Records
	networks   *podenv.Networks
	programs   payload.Paths
	pool       *shim.Launchers
	namespaces podenv.Namespaces
	facts      host.Facts
	handlers   *handler.Set
}

// openParts prepares the host's directories and opens the parts. If it fails, it stops the idle
// launchers.
func openParts(ctx context.Context, cfg Config, network *cni.Network, tasks *task.Runner) (_ *hostParts, err error) {
	undo := cleanup.New()
	defer undo.Run(&err)
	p := &hostParts{dirs: state.Dirs{Root: cfg.Root, State: cfg.State, NetNSs: cfg.NetNSDir}}
	if err := cgroup.Prepare(); err != nil {
		return nil, err
	}
	if p.bootID, err = readBootID(); err != nil {
		return nil, err
	}
	if p.run, err = openRun(p.dirs, cfg.Log); err != nil {
		return nil, err
	}
	if err := p.dirs.Prepare(); err != nil {
		return nil, err
	}
	if p.quotas, err = runtime.OpenQuotas(p.dirs.Writable(""), cfg.LayerLimit, cfg.LayerProjects); err != nil {
		return nil, err
	}
	undo.Add("close quotas", p.quotas.Close)
	if p.records, err = state.OpenRecords(cfg.Root, tasks.Begin); err != nil {
		return nil, err
	}
	if p.networks, err = podenv.OpenNetworks(network, cfg.Root, tasks, cfg.Log); err != nil {
		return nil, err
	}
	if p.programs, err = payload.Install(filepath.Join(cfg.Root, "bin")); err != nil {
		return nil, fmt.Errorf("install pause and monitor: %w", err)
	}
	if p.pool, err = startPool(cfg, p.dirs, p.programs); err != nil {
		return nil, err
	}
	undo.Add("end idle launchers", p.pool.Close)
	p.namespaces = podenv.Namespaces{Dirs: p.dirs, Holder: p.programs.Pause + payload.PauseProgram}
	p.facts = probeUserNamespaces(p.namespaces, cfg)
	p.handlers, err = handler.Open(ctx, handler.Options{
		BuiltIn:  cfg.Handler,
		Programs: cfg.Handlers,
		Default:  cfg.DefaultHandler,
		Host:     p.facts,
		Tasks:    tasks,
		Log:      cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	undo.Release()
	return p, nil
}

// wireManager connects the opened parts. It cannot fail and does not change the host.
func wireManager(cfg Config, images *image.Store, p *hostParts, tasks *task.Runner) *Manager {
	m := newWith(cfg, tasks)
	m.host, m.dirs, m.bootID, m.run = p.facts, p.dirs, p.bootID, p.run
	m.selinux, m.appArmor = lsm.HostSELinux, lsm.NewAppArmor(p.facts.AppArmor, tasks, cfg.Log)
	roots := runtime.Roots{Images: images, Dirs: p.dirs, Quotas: p.quotas}
	m.launcher = newLauncher(cfg, p, roots, m.appArmor, tasks)
	processes := runtime.Processes{Dirs: p.dirs, SystemdCgroup: cfg.SystemdCgroup, Tasks: tasks, Log: cfg.Log}
	m.processes, m.stopper, m.pool = processes, runtime.NewStopper(processes), p.pool
	m.dumper = runtime.Dumper{
		Dirs: p.dirs, SystemdCgroup: cfg.SystemdCgroup, CRIU: cfg.CRIU, Launchers: p.pool, Log: cfg.Log,
	}
	m.images, m.volumes, m.quotas = images, roots, p.quotas
	bin := trash.New(p.dirs.Trash(), safefs.RemoveAll, tasks, cfg.Log)
	m.network, m.records, m.trash, m.handlers = p.networks, p.records, bin, p.handlers
	m.history = history.New(p.dirs.Starts(), cfg.Log)
	m.restores = runtime.Restores{
		Dirs:     p.dirs,
		Key:      m.signing,
		Unpacker: cfg.Unpacker,
	}
	m.podenv = podenv.Provisioner{
		Dirs:           p.dirs,
		HostResolvConf: cfg.HostResolvConf,
		Log:            cfg.Log,
		Namespaces:     p.namespaces,
		Networks:       p.networks,
		SELinux:        m.selinux,
		Images:         images,
		Trash:          bin,
	}
	m.sampler = stats.NewSampler(stats.SamplerConfig{
		Period:        cfg.SamplePeriod,
		Targets:       m.sampleTargets,
		Layers:        p.dirs.Writable(""),
		Images:        images.Root(),
		SystemdCgroup: cfg.SystemdCgroup,
		Begin:         tasks.BeginOpen,
		Log:           cfg.Log,
		Quota:         func(project uint32) (diskusage.Usage, bool, error) { return p.quotas.Usage(project) },
	})
	m.Reader = stats.NewReader(meters{m.objects, m.sampler}, cfg.Log)
	m.Service = stream.New(streamTargets{m.objects, m.images}, p.pool, p.dirs, cfg.SystemdCgroup, cfg.Streams, tasks)
	return m
}

func newLauncher(
	cfg Config, p *hostParts, roots runtime.Roots, appArmor *lsm.AppArmor, tasks *task.Runner,
) runtime.Launcher {
	return runtime.Launcher{
		Node: runtime.Node{
			Host:          p.facts,
			NoAppArmor:    appArmor.Problem,
			CDI:           cfg.CDI,
			Dirs:          p.dirs,
			SystemdCgroup: cfg.SystemdCgroup,
			OwnDevices:    cfg.OwnDevices,
			Defaults:      cfg.Defaults,
			PauseCPUs:     cfg.PauseCPUs,
		},
		Roots:      roots,
		Users:      new(runtime.Users),
		AppArmor:   appArmor,
		SELinux:    lsm.HostSELinux,
		Sources:    runtime.NewSources(tasks),
		Launchers:  p.pool,
		PauseDir:   p.programs.Pause,
		MaxLogLine: cfg.MaxLogLine,
		CRIU:       cfg.CRIU,
		Tasks:      tasks,
		Log:        cfg.Log,

		Unpacker:      cfg.Unpacker,
		IgnoreVolumes: cfg.IgnoreVolumes,
	}
}

// newWith returns a manager without objects and without the parts that need the host.
func newWith(cfg Config, tasks *task.Runner) *Manager {
	if cfg.Observer == nil {
		cfg.Observer = noObserver{}
	}
	c := &control{objects: newObjects(), systemd: cfg.SystemdCgroup, tasks: tasks}
	if cfg.Names != nil {
		cfg.Names.objects.Store(&c.objects)
	}
	m := &Manager{control: c, cfg: cfg, log: cfg.Log, unfinished: newDeferredWork(tasks)}
	m.signing = loadOnce(func() (*archive.Key, error) { return archive.LoadKey(m.dirs.Root) })
	m.Lists, m.events = state.NewLists(m.pods, m.containers)
	m.plugins = pluginCaller{Plugins: cfg.Plugins, Target: pluginRuntime{c}, Tasks: tasks, Log: cfg.Log}
	if cfg.Plugins == nil {
		m.plugins.Plugins = noPlugins{}
	}
	return m
}

// loadOnce returns a function that calls load until it succeeds once, and then returns that result.
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

// start recovers the objects of an earlier daemon and starts the background work.
func (m *Manager) start(ctx context.Context) error {
	if err := m.recover(ctx); err != nil {
		return err
	}
	m.network.OnChange(m.unfinished.retries.Hasten)
	m.tasks.Watchers.Spawn(func() { m.history.Run(m.tasks.Watchers.Context()) })
	m.tasks.Watchers.Spawn(func() { m.disks.Run(m.tasks.Watchers.Context(), m.cfg.Root, m.cfg.State) })
	return m.startSampler()
}

// Close ends the daemon's goroutines and leaves pods and containers running. It waits for running
// operations until ctx ends. The next daemon continues interrupted operations and undo steps. CNI
// plugins are not interrupted and continue without this daemon.
func (m *Manager) Close(ctx context.Context) error {
	idle, err := m.tasks.End(ctx, m.network.Leave)
	m.plugins.Plugins.Close()
	if idle { // else operations still use them
		err = errors.Join(err, m.pool.Close(), m.quotas.Close())
	}
	if len(m.pods.Snapshot()) == 0 && !m.cfg.SystemdCgroup {
		err = errors.Join(err, cgroup.RemoveIfEmpty(oci.DefaultCgroupParent))
	}
	return err
}

func readBootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
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

// HostFacts returns the node's facts.
func (m *Manager) HostFacts() host.Facts { return m.host }

// Waits returns the current waits of operations, oldest first.
func (m *Manager) Waits() []task.Wait { return m.tasks.Waits() }

// RuntimeStatus returns nil, or the error that prevents pods from running. It answers from memory.
func (m *Manager) RuntimeStatus() error { return m.disks.Err() }

// UpdatePodCIDR sets the node's pod CIDR: one CIDR, or several separated by commas. Networks that
// declare the ipRanges capability get it with every new pod. An empty string unsets it. The error
// is InvalidArgument for malformed CIDRs.
func (m *Manager) UpdatePodCIDR(ctx context.Context, cidr string) error {
	return m.network.SetPodCIDR(ctx, cidr)
}

// NetworkStatus returns nil, or the error that prevents pods from getting a network.
func (m *Manager) NetworkStatus(ctx context.Context) error { return m.network.Status(ctx) }

// pauseOOMScore is the pause's oom_score_adj: the OOM killer picks the pause after all containers.
const pauseOOMScore = -998
