// Package cni connects pods to the network by running CNI plugins.
//
// # Contract
//
// A Network follows one configuration directory. The first valid file in lexical order is the
// network new pods join (Plan); Status tells whether pods can join at all. Both answer from memory:
// one owner goroutine watches the directory, reads it, looks for the plugins and asks them for
// their STATUS, and publishes what it found as an immutable view.
//
// What a pod's ADD used is its Attachment, which the caller stores before Add. Del and Check work
// from the Attachment alone, so a configuration that was changed or deleted meanwhile does not
// matter to pods that exist. The caller runs Del after every Add, the failed ones too, until it
// returns nil, and never two operations for one pod at the same time.
//
// A plugin runs in a cgroup of its own (runs.go). One that has begun ends by itself, or is killed
// with all that it started after Config.Timeout: one that is killed half-way may not be able to go
// on where it was. A caller's context bounds what comes before that. Plugins of a daemon that stops
// (Leave) or is killed go on; New of the next one waits for them and ends those that hang. The
// pod's network namespace is made by netns.New, with its loopback interface up, so no loopback
// plugin is needed.
//
// A plugin that is built in (Config.BuiltIn) is called, not executed. It ends with the daemon at
// any instruction, and is made for that: its DEL goes on wherever it was.
//
// Specification: CNI 1.1.0; configurations from 0.1.0 to 1.1.0 are understood.
package cni

import (
	"context"
	"log/slog"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sync/semaphore"

	"berth/internal/errdefs"
	"berth/internal/task"
)

// IfName is the name of the interface a pod gets from its network.
const IfName = "eth0"

const (
	// DefaultTimeout bounds one ADD, DEL or CHECK. It is less than
	// half of what kubelet grants RunPodSandbox, so that the undo of a hung ADD has time too, and less than
	// it grants StopPodSandbox, so that it is told which plugin hung.
	DefaultTimeout = 110 * time.Second
	// statusTimeout bounds one round of STATUS.
	statusTimeout = 10 * time.Second
	// maxViewAge is the age at which Status asks for a fresh view.
	maxViewAge = 5 * time.Second
	// maxObstaclesAge is the age at which a STATUS triggers another search for obstacles. It is long
	// because a firewall may have many rules.
	maxObstaclesAge = time.Minute
	// wholeGate is the weight of GC, more than there can be operations.
	wholeGate = math.MaxInt64
)

// Config tells a Network where things are. All paths are absolute.
type Config struct {
	ConfDir  string        // configuration files; need not exist
	BinDirs  []string      // plugins, first match wins; also given to plugins as CNI_PATH
	CacheDir string        // libcni's record of results, private to berth, survives a restart
	RunDir   string        // where running plugins are noted, gone after a reboot; empty: nowhere, they have no cgroups, and their children can outlive them
	Timeout  time.Duration // longest ADD, DEL or CHECK; 0: DefaultTimeout
	Waits    *task.Waits   // where waits are noted; nil: nowhere

	BuiltIn map[string]BuiltIn // plugins that are called instead of executed, by plugin type
	Readers Readers
	List    []byte // the complete configuration list of the network; nil: ConfDir has it
}

// BuiltIn is a plugin as a function: stdin, environment and output are the program's (CNI specification, section 3). Its errors are
// of type *types.Error. ctx bounds its waits.
type BuiltIn func(ctx context.Context, stdin []byte, environ []string) (stdout []byte, err error)

// Network runs plugins for the network configured in a directory. Its methods
// may be called concurrently.
type Network struct {
	cfg     Config
	log     *slog.Logger
	plugins *runner
	lib     *libcni.CNIConfig

	view    atomic.Pointer[view]        // written by New, then by the owner goroutine alone
	refresh chan struct{}               // wakes the owner; capacity 1
	ranges  atomic.Pointer[[][]IPRange] // of new pods; nil: none were given

	// gate keeps GC alone: the specification (section 3, lifecycle and ordering)
	// forbids ADD and DEL while it runs. An operation holds 1, GC holds all.
	gate *semaphore.Weighted

	left  context.Context // ends with Leave
	leave context.CancelFunc

	stop context.CancelFunc
	done sync.WaitGroup // the owner goroutine and its STATUS probes
}

// New waits for what plugins of an earlier daemon with the same RunDir left, for some seconds, and kills what
// hangs; then it reads the configuration and starts to follow it. Errors: InvalidArgument for a Config that cannot work. Where the
// kernel has no inotify instance left, the directory is followed by Status alone
// and the log says so.
func New(cfg Config, log *slog.Logger) (*Network, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	plugins := &runner{log: log, runs: newRuns(cfg.RunDir, log), builtIn: cfg.BuiltIn}
	n := &Network{
		cfg:     cfg,
		log:     log,
		plugins: plugins,
		lib:     libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, cfg.CacheDir, plugins),
		refresh: make(chan struct{}, 1),
		gate:    semaphore.NewWeighted(wholeGate),
	}
	n.left, n.leave = context.WithCancel(context.Background())
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	if err := plugins.runs.endAll(ctx); err != nil {
		log.Error("end what CNI plugins of an earlier daemon left running", "error", err)
	}
	o := newOwner(ctx, n)
	o.reload()
	n.done.Go(o.run)
	return n, nil
}

func (c Config) validate() error {
	if len(c.BinDirs) == 0 {
		return errdefs.InvalidArgument("CNI: no plugin directory given")
	}
	for _, dir := range append([]string{c.ConfDir, c.CacheDir}, c.BinDirs...) {
		if !filepath.IsAbs(dir) {
			return errdefs.InvalidArgument("CNI: %q is not an absolute path", dir)
		}
	}
	for _, dir := range c.BinDirs {
		if strings.ContainsRune(dir, filepath.ListSeparator) { // CNI_PATH is a list
			return errdefs.InvalidArgument("CNI: plugin directory %q contains %q", dir, filepath.ListSeparator)
		}
	}
	return nil
}

// Leave is for a daemon that ends: no operation begins any more, and who waits for one gets Unavailable at once. Plugins
// that run are not touched. They are noted in RunDir, for the next daemon.
func (n *Network) Leave() { n.leave() }

// Close stops following the directory and ends STATUS probes. Running Add, Del,
// Check and GC calls are not affected.
func (n *Network) Close() {
	n.stop()
	n.done.Wait()
}

// Status returns nil if pods can join the network. Otherwise the error tells why
// not: FailedPrecondition without a valid configuration or with a plugin not
// installed, Unavailable if a plugin's STATUS (spec 1.1) failed or is not known yet.
//
// The answer comes from memory. When it is older than a few seconds a new one is
// found in the background for the next caller.
func (n *Network) Status(context.Context) error {
	v := n.view.Load()
	if time.Since(v.at) > maxViewAge {
		n.askRefresh()
	}
	return v.ready()
}

// AskStatus is Status for those who ask once and can wait: it asks the plugins itself, for at
// most ten seconds or until ctx ends.
func (n *Network) AskStatus(ctx context.Context) error {
	v := n.view.Load()
	switch {
	case v.net == nil:
		return v.loadErr
	case v.missing != nil:
		return v.missing
	case !supports11(v.net.list):
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	return n.askStatus(ctx, v.net.list, n.ranges.Load())
}

// SetIPRanges sets the ranges that new pods get their addresses from. STATUS uses them at once. The
// caller passes them to Add in Pod.IPRanges, since a pod keeps its ranges.
func (n *Network) SetIPRanges(ranges [][]IPRange) {
	n.ranges.Store(&ranges)
	n.askRefresh()
}

// IPRanges returns the ranges of new pods, nil if none were set.
func (n *Network) IPRanges() [][]IPRange {
	if ranges := n.ranges.Load(); ranges != nil {
		return *ranges
	}
	return nil
}

func (n *Network) askRefresh() {
	select {
	case n.refresh <- struct{}{}:
	default: // a wake-up is already waiting
	}
}

// Plan returns the attachment a new pod shall use, to be stored before Add.
// FailedPrecondition without a valid configuration. It does not look at STATUS:
// the plugin itself refuses an ADD it cannot do.
func (n *Network) Plan() (Attachment, error) {
	v := n.view.Load()
	if v.net == nil {
		return Attachment{}, v.loadErr
	}
	return Attachment{Network: v.net.list.Name, IfName: IfName, ConfList: v.net.list.Bytes}, nil
}

// Info describes the network for people: verbose Status prints it as JSON.
type Info struct {
	ConfDir    string    `json:"confDir"`
	BinDirs    []string  `json:"binDirs"`
	File       string    `json:"file,omitempty"`       // the configuration in use
	Network    string    `json:"network,omitempty"`    // its name
	CNIVersion string    `json:"cniVersion,omitempty"` // the specification version in use
	Plugins    []string  `json:"plugins,omitempty"`    // their types, in chain order
	Skipped    []Skipped `json:"skipped,omitempty"`    // invalid files before it
	Error      string    `json:"error,omitempty"`      // why the network is not ready
	Obstacles  []string  `json:"obstacles,omitempty"`  // what is in the way of pods all the same, and what mends it
	At         time.Time `json:"at"`                   // when this was found
}

// Skipped is a configuration file that is not valid.
type Skipped struct {
	File  string `json:"file"`
	Error string `json:"error"`
}

// Info returns what the last look at the configuration found.
func (n *Network) Info() Info {
	v := n.view.Load()
	info := Info{ConfDir: n.cfg.ConfDir, BinDirs: n.cfg.BinDirs, Skipped: v.skipped, At: v.at}
	if err := v.ready(); err != nil {
		info.Error = err.Error()
	}
	if v.net != nil {
		info.File, info.Network, info.CNIVersion = v.net.file, v.net.list.Name, v.net.list.CNIVersion
		for _, o := range v.obstacles {
			info.Obstacles = append(info.Obstacles, o.Problem+": "+o.Fix)
		}
		for _, p := range v.net.list.Plugins {
			info.Plugins = append(info.Plugins, p.Network.Type)
		}
	}
	return info
}
