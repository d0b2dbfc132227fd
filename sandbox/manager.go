package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"berth/cni"
	"berth/image"
	"berth/internal/cdi"
	"berth/internal/cgroup"
	"berth/internal/host"
	"berth/internal/index"
	"berth/internal/join"
	"berth/internal/lograte"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/internal/trash"
	"berth/internal/writable"
	"berth/oci"
	"berth/sandbox/handler"
	"berth/sandbox/lsm"
	"berth/sandbox/plugins"
	"berth/sandbox/podenv"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	"berth/sandbox/stream"
	"berth/shim"
	"berth/shim/payload"
)

// Config is what the daemon decides for all pods.
type Config struct {
	Root           string                    // durable state: records, pod files, writable layers; survives a reboot
	State          string                    // what dies with the boot: shim directories, the pods' shm
	NetNSDir       string                    // where network namespaces are pinned, /run/netns
	HostResolvConf string                    // what pods with the Default DNS policy get, /etc/resolv.conf
	SystemdCgroup  bool                      // cgroup driver: systemd, else cgroupfs
	Handler        string                    // name of the built-in runtime handler
	Handlers       map[string]handler.Config // the others
	DefaultHandler string                    // the one that "" means; empty: Handler
	PauseImage     string                    // image to use instead of the embedded pause; empty: none
	ShimPath       string                    // the berth-shim binary
	IdleLaunchers  int                       // launchers kept ready
	MaxLogLine     int                       // bytes before a log line is split as partial
	Plugins        plugins.Plugins           // nil: none
	SamplePeriod   time.Duration             // between two counts of what a container has written
	LayerLimit     uint64                    // bytes that a container's writable layer may take; 0: no limit
	LayerProjects  uint32                    // the first of the project IDs of writable layers
	Streams        stream.Limits             // what clients may have under way
	Host           host.Facts                // from host.Detect
	CDI            cdi.Dirs                  // where CDI devices are described
	OwnDevices     bool                      // devices belong to the user and group of the security context
	Waits          *task.Waits               // where waits are noted
	Log            *slog.Logger
	LogFormat      string // of Log: json or text
}

// Manager owns all pods and containers.
type Manager struct {
	*state.Lists[*pod, *container] // Pods, Containers, Events
	*stream.Service                // Exec, ExecSync, Attach, PortForward
	*stats.Reader                  // ContainerStats, PodStats

	cfg       Config
	host      host.Facts // complete after probeUserNamespaces
	log       *slog.Logger
	images    *image.Store
	networks  *podenv.Networks
	launchers *shim.Launchers
	plugins   plugins.Caller
	payload   payload.Paths
	bootID    string
	run       state.Run // of the state directory

	dirs         state.Dirs
	trash        *trash.Trash
	namespaces   podenv.Namespaces
	processes    runtime.Processes
	ending       *runtime.Stopper
	roots        runtime.Roots
	launch       runtime.Launcher
	podenv       podenv.Provisioner
	pods         *index.Index[*pod]
	containers   *index.Index[*container]
	podIDs       join.Joiner // by (namespace, name, uid, attempt)
	containerIDs join.Joiner // by (pod, name, attempt)
	records      *state.Records
	appArmor     *lsm.AppArmor
	selinux      lsm.SELinux
	labels       lsm.Holders
	unfinished   *deferredWork // found half done by recover
	events       *state.Events
	sampler      *stats.Sampler
	unmeasured   lograte.Limiter // warnings of usage that can't be kept
	tasks        *task.Runner
	handlers     *handler.Set
	disks        writable.Watch // root and state
}

// closeLimit is for a manager that could not be opened: it has no operations.
const closeLimit = 5 * time.Second

// Open prepares the state directories, reads all records, finds again what runs
// and goes on with what an earlier daemon left half done. The daemon holds the
// lock of root and state.
func Open(ctx context.Context, cfg Config, images *image.Store, network *cni.Network) (*Manager, error) {
	m := &Manager{cfg: cfg, host: cfg.Host, log: cfg.Log, images: images,
		pods: index.New[*pod]("pod sandbox"), containers: index.New[*container]("container"),
		selinux: lsm.HostSELinux, tasks: task.NewRunner(cfg.Log, cfg.Waits)}
	m.unfinished = newDeferredWork(m.tasks)
	m.dirs = state.Dirs{Root: cfg.Root, State: cfg.State, NetNSs: cfg.NetNSDir}
	m.processes = runtime.Processes{Dirs: m.dirs, SystemdCgroup: cfg.SystemdCgroup, Tasks: m.tasks, Log: m.log}
	m.ending = runtime.NewStopper(m.processes)
	m.Lists, m.events = state.NewLists(m.pods, m.containers)
	m.roots = runtime.Roots{Images: images, Dirs: m.dirs}
	m.trash = trash.New(m.dirs.Trash(), safefs.RemoveAll, m.log)
	m.sampler = m.newSampler()
	m.appArmor = lsm.NewAppArmor(cfg.Host.AppArmor, m.tasks, m.log)
	m.plugins = plugins.Caller{Plugins: cfg.Plugins, Runtime: pluginRuntime{m}, Tasks: m.tasks, Log: m.log}
	if cfg.Plugins == nil {
		m.plugins.Plugins = plugins.None{}
	}
	openNetworks := func() (err error) {
		m.networks, err = podenv.OpenNetworks(network, cfg.Root, m.tasks, m.log)
		return err
	}
	for _, step := range []func() error{cgroup.Prepare, m.readBootID, m.openRun, m.dirs.Prepare, m.openQuotas, m.openRecords, openNetworks, m.startLaunchers, m.probeUserNamespaces,
		func() error { return m.openHandlers(ctx) }} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	m.assemble()
	if m.host.OOMScoreAdjMin > pauseOOMScore {
		m.log.Warn("the kernel refuses to lower oom_score_adj (CAP_SYS_RESOURCE is missing): pods and containers get the lowest value allowed",
			"wanted", pauseOOMScore, "lowest", m.host.OOMScoreAdjMin)
	}
	m.appArmor.Ensure(ctx)
	err := m.recover(ctx)
	if err == nil {
		m.tasks.Watchers.Spawn(func() { m.disks.Run(m.tasks.Watchers.Context(), m.cfg.Root, m.cfg.State) })
		err = m.startSampler()
	}
	if err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
		defer cancel()
		return nil, errors.Join(err, m.Close(ctx))
	}
	return m, nil
}

// Close stops the daemon's part of everything and leaves pods and containers
// running. Operations under way are waited for, until ctx ends at most; the next daemon
// goes on with those that did not end, and with what was being undone. CNI plugins are not interrupted: what
// runs when everything else is told to end goes on without this daemon.
func (m *Manager) Close(ctx context.Context) error {
	idle, err := m.tasks.End(ctx, m.networks.Leave)
	m.plugins.Plugins.Close()
	if idle { // else they are in use
		err = errors.Join(err, m.launchers.Close(), m.roots.Quotas.Close())
	}
	if len(m.pods.Snapshot()) == 0 && !m.cfg.SystemdCgroup {
		err = errors.Join(err, cgroup.RemoveIfEmpty(oci.DefaultCgroupParent))
	}
	return err
}

func (m *Manager) openQuotas() (err error) {
	m.roots.Quotas, err = runtime.OpenQuotas(m.dirs.Writable(""), m.cfg.LayerLimit, m.cfg.LayerProjects)
	return err
}

func (m *Manager) readBootID() error {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read boot ID: %w", err)
	}
	m.bootID = strings.TrimSpace(string(data))
	return nil
}

// openRun finds out whether the state directory is that of the daemon before this one.
func (m *Manager) openRun() (err error) {
	m.run, err = m.dirs.OpenRun()
	if err == nil && m.run.ID == "" {
		m.log.Warn("write the ID of the state directory: there is no room, or it is read-only; until it is written a restart without a new boot ID is not noticed",
			"path", m.dirs.RunID())
	}
	return err
}

func (m *Manager) openRecords() (err error) {
	m.records, err = state.OpenRecords(m.cfg.Root, m.tasks.Begin)
	return err
}

func (m *Manager) startLaunchers() (err error) {
	m.payload, err = payload.Install(filepath.Join(m.cfg.Root, "bin"))
	if err != nil {
		return fmt.Errorf("install pause and monitor: %w", err)
	}
	m.namespaces = podenv.Namespaces{Dirs: m.dirs, Holder: m.payload.Pause + payload.PauseProgram}
	m.launchers, err = shim.New(shim.Config{
		ShimPath:    m.cfg.ShimPath,
		MonitorPath: m.payload.Monitor,
		StateRoot:   m.dirs.Libcontainer(),
		Idle:        m.cfg.IdleLaunchers,
		Warm:        m.host.RootShared,
		Log:         m.log,
		LogFormat:   m.cfg.LogFormat,
	})
	return err
}

// probeUserNamespaces completes the node's facts with the result of probing user namespaces. It runs
// before any part of the manager gets the facts, which do not change afterwards.
func (m *Manager) probeUserNamespaces() error {
	err := m.namespaces.Probe()
	if err != nil {
		m.log.Warn("pods cannot have user namespaces", "error", err)
	}
	m.host = m.host.WithUserNamespaces(err)
	return nil
}

// HostFacts returns the node's facts.
func (m *Manager) HostFacts() host.Facts { return m.host }

// assemble makes the parts that are made of others.
func (m *Manager) assemble() {
	node := runtime.Node{Host: m.host, NoAppArmor: m.appArmor.Problem, CDI: m.cfg.CDI, Dirs: m.dirs,
		SystemdCgroup: m.cfg.SystemdCgroup, OwnDevices: m.cfg.OwnDevices}
	m.launch = runtime.Launcher{Node: node, Roots: m.roots, Users: new(runtime.Users), AppArmor: m.appArmor, SELinux: m.selinux,
		Sources: runtime.NewSources(m.tasks), Launchers: m.launchers, PauseDir: m.payload.Pause, MaxLogLine: m.cfg.MaxLogLine, Tasks: m.tasks}
	m.podenv = podenv.Provisioner{Dirs: m.dirs, HostResolvConf: m.cfg.HostResolvConf, Namespaces: m.namespaces, Networks: m.networks,
		SELinux: m.selinux, Images: m.images, Trash: m.trash}
	m.Reader = stats.NewReader(meters{m}, m.log)
	m.Service = stream.New(streamTargets{m}, m.launchers, m.dirs, m.cfg.SystemdCgroup, m.cfg.Streams, m.tasks)
}

// Waits returns what operations are waiting for at the moment, oldest first.
func (m *Manager) Waits() []task.Wait { return m.tasks.Waits() }

// RuntimeStatus tells why no pod can be run at the moment, or nil. It answers from memory.
func (m *Manager) RuntimeStatus() error { return m.disks.Err() }

// UpdatePodCIDR takes the node's pod CIDR, one or several comma-separated. Networks that declare the ipRanges
// capability get it with every new pod. Empty: none. InvalidArgument otherwise.
func (m *Manager) UpdatePodCIDR(ctx context.Context, cidr string) error {
	return m.networks.SetPodCIDR(ctx, cidr)
}

// NetworkStatus tells why pods can't have a network at the moment, or nil.
func (m *Manager) NetworkStatus(ctx context.Context) error { return m.networks.Status(ctx) }

// pauseOOMScore is the pause's oom_score_adj: it goes last, after all containers.
const pauseOOMScore = -998
