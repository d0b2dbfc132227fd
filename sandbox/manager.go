package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"berth/checkpoint/process"
	"berth/cni"
	"berth/image"
	"berth/internal/cgroup"
	"berth/internal/host"
	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/handler"
	"berth/sandbox/lsm"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	"berth/sandbox/stream"
)

// Config holds the daemon's settings for all pods.
type Config struct {
	Root           string                    // durable state: records, pod files, writable layers; survives a reboot
	State          string                    // state of the current boot: shim directories, the pods' shm
	NetNSDir       string                    // where network namespaces are pinned, /run/netns
	HostResolvConf func() string             // path of the resolv.conf of pods with the Default DNS policy
	SystemdCgroup  bool                      // cgroup driver: systemd, else cgroupfs
	Names          *Names                    // gets the names of objects; may be nil
	Handler        string                    // name of the built-in runtime handler
	Handlers       map[string]handler.Config // the other runtime handlers
	DefaultHandler string                    // the handler of pods that name no handler; empty: Handler
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
	Restores       state.RestoreMode         // which containers CRIU may restore
	Unpacker       runtime.Unpacker          // berth-unpack
	OwnDevices     bool                      // devices belong to the user and group of the security context
	Defaults       oci.Defaults              // of all containers
	PauseCPUs      string                    // CPUs of pauses; empty: all
	IgnoreVolumes  bool                      // VOLUMEs of images have no effect
	// PullPause pulls a pause image that is missing, without credentials.
	PullPause  func(ctx context.Context, ref string) (*image.Image, error)
	LayersLost bool        // containers on incomplete layers read zeros, so they are killed
	Waits      *task.Waits // lists the waits of operations
	Observer   Observer    // nil: none
	Log        *slog.Logger
	LogFormat  string // of Log: json or text
	// Told are the last events that an earlier daemon has published, by the object's ID.
	Told map[string]state.ToldEvent
}

// Manager runs the lifecycle of all pods and containers. It orders the steps of each operation, and
// calls the embedded parts and the fields below them.
type Manager struct {
	*state.Lists[*pod, *container] // Pods, Containers, Events
	*stream.Service                // Exec, ExecSync, Attach, PortForward
	*stats.Reader                  // ContainerStats, PodStats
	*starts                        // Starts, Start, StartOf, RecordPull
	*checkpoints                   // CheckpointContainer, CheckpointPod
	*restorer                      // RestorePod

	cfg      Config
	log      *slog.Logger
	tasks    *task.Runner
	node     state.Node
	bootID   string
	run      state.Run // of the state directory
	objects  objects
	control  *control
	plugins  nriCalls
	meters   *meters
	events   eventLog
	handlers *handler.Set
	selinux  lsm.SELinux
	labels   lsm.Holders

	launcher  Starter
	processes Processes
	stopper   Stopper
	images    Images
	volumes   Volumes
	network   Network
	podenv    Environment
	records   Records
	trash     Trash
	pool      Pool
	quotas    *runtime.Quotas // nil where quotas are off

	podIDs       creations     // by (namespace, name, uid, attempt)
	containerIDs creations     // by (pod, name, attempt)
	unfinished   *deferredWork // found by recovery
	disks        writableWatch // of root and state
}

// closeTimeout bounds Close after Open failed, when no operation runs.
const closeTimeout = 5 * time.Second

// Open prepares the state directories, loads all records, adopts running containers, and continues
// the unfinished operations of an earlier daemon. The daemon holds the locks of root and state.
func Open(ctx context.Context, cfg Config, images *image.Store, network *cni.Network) (*Manager, error) {
	tasks := task.NewRunner(cfg.Log, cfg.Waits)
	parts, err := openParts(ctx, cfg, images, network, tasks)
	if err != nil {
		return nil, err
	}
	m := newManager(cfg, parts, tasks)
	if m.node.Host.OOMScoreAdjMin > pauseOOMScore {
		m.log.Warn("the kernel refuses to lower oom_score_adj (CAP_SYS_RESOURCE is missing): pods and containers get the lowest value allowed",
			"wanted", pauseOOMScore, "lowest", m.node.Host.OOMScoreAdjMin)
	}
	parts.appArmor.Ensure(ctx)
	if err := m.start(ctx); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		return nil, errors.Join(err, m.Close(ctx))
	}
	return m, nil
}

// newManager connects a manager without objects with its parts. It cannot fail and does not change
// the host.
func newManager(cfg Config, p *parts, tasks *task.Runner) *Manager {
	if cfg.Observer == nil {
		cfg.Observer = noObserver{}
	}
	all := newObjects()
	if cfg.Names != nil {
		cfg.Names.objects.Store(&all)
	}
	lists, events := state.NewLists(all.pods, all.containers)
	events.Continue(cfg.Told)
	k := &control{
		objects: all, node: p.node, tasks: tasks, events: events, records: p.records, stopper: p.stopper,
	}
	m := &Manager{
		Lists:    lists,
		Service:  stream.New(streamTargets{all, p.images}, p.launchers, p.node, cfg.Streams, tasks),
		starts:   &starts{objects: all},
		cfg:      cfg,
		log:      cfg.Log,
		tasks:    tasks,
		node:     p.node,
		bootID:   p.bootID,
		run:      p.run,
		objects:  all,
		control:  k,
		plugins:  newNRICalls(cfg, k),
		meters:   newMeters(cfg, p, all, tasks),
		events:   eventLog{log: cfg.Log, objects: all},
		handlers: p.handlers,
		selinux:  p.selinux,

		launcher:  p.launcher,
		processes: p.processes,
		stopper:   p.stopper,
		images:    p.images,
		volumes:   p.volumes,
		network:   p.network,
		podenv:    p.podenv,
		records:   p.records,
		trash:     p.trash,
		pool:      p.pool,
		quotas:    p.quotas,

		unfinished: newDeferredWork(tasks),
	}
	m.Reader = stats.NewReader(m.meters, cfg.Log)
	m.checkpoints = &checkpoints{
		objects: all, control: k, node: p.node, tasks: tasks, log: cfg.Log, unfinished: m.unfinished,
		launcher: p.launcher, images: p.images, dumper: p.dumper, signing: p.key, streams: m.Service,
		outputs: process.NewOutputs(p.node.Checkpoints()),
	}
	m.restorer = &restorer{m: m, restores: p.restores}
	return m
}

// start recovers the objects of an earlier daemon and starts the background work.
func (m *Manager) start(ctx context.Context) error {
	if err := (&recovery{m}).run(ctx); err != nil {
		return err
	}
	m.network.OnChange(m.unfinished.retries.Hasten)
	m.tasks.Watchers.Spawn(func() { m.disks.Run(m.tasks.Watchers.Context(), m.cfg.Root, m.cfg.State) })
	return m.meters.start()
}

// Close ends the daemon's goroutines and leaves pods and containers running. It waits for running
// operations until ctx ends. The next daemon continues interrupted operations and undo steps. CNI
// plugins are not interrupted and continue without this daemon.
func (m *Manager) Close(ctx context.Context) error {
	idle, err := m.tasks.End(ctx, m.network.Leave)
	m.plugins.caller.Plugins.Close()
	if idle { // otherwise operations still use them
		err = errors.Join(err, m.pool.Close(), m.quotas.Close())
	}
	if len(m.objects.pods.Snapshot()) == 0 && !m.node.SystemdCgroup {
		err = errors.Join(err, cgroup.RemoveIfEmpty(oci.DefaultCgroupParent))
	}
	return err
}

// HostFacts returns the node's facts.
func (m *Manager) HostFacts() host.Facts { return m.node.Host }

// OOMKills returns how many processes in containers the OOM killer has killed since the daemon's
// start. It reads one file for each running container.
func (m *Manager) OOMKills() uint64 { return m.meters.oomKillsSoFar() }

// WritableFilesystem returns the filesystem of the writable layers and their usage, from memory.
func (m *Manager) WritableFilesystem() stats.Filesystem { return m.meters.sampler.Filesystem() }

// StopContainer sends the container's stop signal, waits up to timeout for the exit, and then kills
// the container (see control.StopContainer).
func (m *Manager) StopContainer(ctx context.Context, id string, timeout time.Duration) error {
	return m.control.StopContainer(ctx, id, timeout)
}

// Unrecorded returns the IDs of pods and containers without a record that have files on the host.
// They are removed in the background.
func (m *Manager) Unrecorded() (map[string]bool, error) { return m.podenv.Unrecorded(m.objects.has) }

// Waits returns the current waits of operations, oldest first.
func (m *Manager) Waits() []task.Wait { return m.tasks.Waits() }

// RuntimeStatus returns nil, or the error that prevents pods from running. It answers from memory.
func (m *Manager) RuntimeStatus() error { return m.disks.Err() }

// UpdatePodCIDR sets the node's pod CIDR: one CIDR, or several separated by commas. Networks that
// declare the ipRanges capability get the CIDRs with every new pod. An empty string unsets it. The
// error is InvalidArgument for malformed CIDRs.
func (m *Manager) UpdatePodCIDR(ctx context.Context, cidr string) error {
	return m.network.SetPodCIDR(ctx, cidr)
}

// NetworkStatus returns nil, or the error that prevents pods from getting a network.
func (m *Manager) NetworkStatus(ctx context.Context) error { return m.network.Status(ctx) }

// pauseOOMScore is the pause's oom_score_adj. With it the OOM killer picks the pause after all
// containers.
const pauseOOMScore = -998
