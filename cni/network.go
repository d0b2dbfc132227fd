// Package cni connects pods to the network by running CNI plugins.
//
// # Contract
//
// A [Network] follows one configuration directory. New pods join the network of the first valid
// file in lexical order ([Network.Plan]). [Network.Status] reports whether pods can join at all.
// Both answer from memory. One owner goroutine watches and reads the directory, finds the plugins,
// and runs their STATUS. It publishes the result as an immutable view.
//
// An Attachment holds the configuration of a pod's ADD. The caller stores it before Add. Del uses
// only the Attachment, so a configuration may change or vanish while pods use it. The caller runs
// Del after every Add, including a failed one, until Del returns nil. It never runs two
// operations for one pod at the same time.
//
// Each plugin runs in a separate cgroup (runs.go). If it does not exit within Config.Timeout, it is
// killed with its children. A caller's context does not stop it, because a plugin that is killed
// half-way may not be able to continue later. If the daemon stops ([Network.Leave]) or is killed,
// its plugins continue. [New] of the next daemon waits for them and kills hung ones. The pod's
// network namespace comes from netns.New, which brings the loopback interface up, so no loopback
// plugin is needed.
//
// A built-in plugin ([BuiltIn]) is a function call. It may end with the daemon at any instruction,
// and its DEL must handle that.
//
// Specification: CNI 1.1.0. Configurations from 0.1.0 to 1.1.0 are supported.
package cni

import (
	"context"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"berth/internal/errdefs"
	"berth/internal/task"
)

// IfName is the name of a pod's network interface.
const IfName = "eth0"

const (
	// DefaultTimeout bounds one ADD or DEL. Twice this time is less than kubelet's timeout
	// of RunPodSandbox, so a hung ADD can be undone. This time is less than kubelet's timeout of
	// StopPodSandbox, so the error can name the plugin that hung.
	DefaultTimeout = 110 * time.Second
	// statusTimeout bounds one round of STATUS.
	statusTimeout = 10 * time.Second
	// maxViewAge is how old a view may be before Status triggers a reload.
	maxViewAge = time.Second
	// refreshTimeout bounds the wait of Status for a reload and the plugins' answers.
	refreshTimeout = time.Second
	// wholeGate is the gate's weight for GC. It exceeds any number of operations.
	wholeGate = math.MaxInt64
)

// Config has the paths and limits of a [Network]. All paths are absolute.
type Config struct {
	ConfDir  string   // configuration files; may not exist
	BinDirs  []string // plugin directories, of which the first with the plugin counts; plugins get them as CNI_PATH
	CacheDir string   // libcni's cache of results, private to berth; survives a restart
	// has notes of running plugins, lost at a reboot; "": plugins run without notes and cgroups,
	// and their children can outlive them
	RunDir  string
	Timeout time.Duration // of one ADD or DEL; 0: DefaultTimeout
	Waits   *task.Waits   // register of waits; may be nil

	// Ran is called after each run of a plugin, with the plugin's type and the verb, unless the
	// plugin does not implement the verb. It must not block. It may be nil.
	Ran func(plugin, verb string, took time.Duration, err error)

	BuiltIn map[string]BuiltIn // by plugin type
	Readers Readers
	List    []byte // the complete configuration list of the network; nil: use ConfDir
}

// BuiltIn is a plugin in the form of a function. stdin, environ and stdout have the contents of CNI
// specification section 3. Errors have the type *types.Error. ctx bounds waits.
type BuiltIn func(ctx context.Context, stdin []byte, environ []string) (stdout []byte, err error)

// Network runs plugins for the network configured in a directory. [New] opens it. Its methods may
// be called concurrently.
type Network struct {
	cfg     Config
	log     *slog.Logger
	plugins *runner
	dirs    atomic.Pointer[directories]

	view    atomic.Pointer[view]          // written by New, then only by the owner goroutine
	refresh chan struct{}                 // wakes the owner; capacity 1
	round   atomic.Pointer[chan struct{}] // closed at the end of the next refresh; only the owner replaces it
	moved   chan struct{}                 // makes the owner watch new directories; capacity 1
	ranges  atomic.Pointer[[][]IPRange]   // of new pods; nil: not set
	changed atomic.Pointer[func()]        // see OnChange; nil: none

	// gate blocks ADD and DEL while GC runs (specification, section 3, lifecycle and ordering). An
	// operation holds weight 1, GC holds wholeGate.
	gate *semaphore.Weighted

	left  context.Context // ends with Leave
	leave context.CancelFunc

	stop context.CancelFunc
	done sync.WaitGroup // the owner goroutine and its STATUS rounds
}

// New opens a network. It first waits some seconds for plugins of an earlier daemon with the same
// RunDir and kills hung ones. Then it reads the configuration and follows it. Errors:
// InvalidArgument for an invalid Config. If the kernel has no free inotify instance, New logs a
// warning, and Status triggers each reload.
func New(cfg Config, log *slog.Logger) (*Network, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	plugins := &runner{log: log, runs: newRuns(cfg.RunDir, log), builtIn: cfg.BuiltIn, ran: cfg.Ran}
	n := &Network{
		cfg:     cfg,
		log:     log,
		plugins: plugins,
		refresh: make(chan struct{}, 1),
		moved:   make(chan struct{}, 1),
		gate:    semaphore.NewWeighted(wholeGate),
	}
	n.beginRound()
	n.setDirectories(cfg.ConfDir, cfg.BinDirs)
	n.left, n.leave = context.WithCancel(context.Background())
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	if err := plugins.runs.endAll(ctx); err != nil {
		log.Error("stop CNI plugins of an earlier daemon", "error", err)
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

// Leave prepares the exit of the daemon: no operation starts any more, and waiting callers get
// Unavailable at once. Running plugins continue. The next daemon reads their notes in RunDir.
func (n *Network) Leave() { n.leave() }

// Close stops following the directory and cancels STATUS. Running Add, Del and GC calls are not
// affected.
func (n *Network) Close() {
	n.stop()
	n.done.Wait()
}

// Status returns nil if pods can join the network. The error is FailedPrecondition if there is no
// valid configuration, or if a plugin is not installed. Unavailable if a plugin's STATUS (CNI 1.1)
// failed or still runs.
//
// The answer comes from memory. If the answer is older than a second, or if the plugins have
// changed, Status triggers a reload in the background. It waits for the reload for at most a
// second, so that it knows which plugins are installed now.
func (n *Network) Status(ctx context.Context) error {
	if v := n.view.Load(); time.Since(v.at) > maxViewAge || n.pluginsChanged(v) {
		n.awaitRefresh(ctx)
	}
	return n.view.Load().ready()
}

// pluginsChanged reports whether other programs are installed than the view has seen. Nothing
// watches their directories.
func (n *Network) pluginsChanged(v *view) bool {
	if v.net == nil {
		return false
	}
	plugins, missing := n.findPlugins(v.net.list)
	return (missing == nil) != (v.missing == nil) || missing == nil && !slices.Equal(plugins, v.plugins)
}

// awaitRefresh triggers a reload and waits for it and the plugins' answers.
func (n *Network) awaitRefresh(ctx context.Context) {
	round := *n.round.Load()
	n.askRefresh()
	timer := time.NewTimer(refreshTimeout)
	defer timer.Stop()
	select {
	case <-round:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// beginRound prepares the next refresh. endRound ends the waits for the current refresh.
func (n *Network) beginRound() {
	round := make(chan struct{})
	n.round.Store(&round)
}

func (n *Network) endRound() {
	ended := *n.round.Load()
	n.beginRound()
	close(ended)
}

// AskStatus runs STATUS and waits for its result, for at most ten seconds or until ctx ends. It
// returns the same errors as [Network.Status].
func (n *Network) AskStatus(ctx context.Context) error {
	v := n.view.Load()
	switch {
	case v.net == nil:
		return v.loadErr
	case v.missing != nil:
		return v.missing
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	if err := checkVersions(ctx, v.net.list, v.plugins); err != nil || !supports11(v.net.list) {
		return err
	}
	return n.askStatus(ctx, v.net.list, n.ranges.Load())
}

// SetIPRanges sets the address ranges of new pods. STATUS uses the ranges at once. The caller
// passes them to [Network.Add] in the IPRanges of a [Pod], because a pod keeps its ranges.
func (n *Network) SetIPRanges(ranges [][]IPRange) {
	n.ranges.Store(&ranges)
	n.askRefresh()
}

// IPRanges returns the ranges of new pods, or nil if no ranges were set.
func (n *Network) IPRanges() [][]IPRange {
	if ranges := n.ranges.Load(); ranges != nil {
		return *ranges
	}
	return nil
}

// OnChange sets a function that is called after the configuration has changed, or the network has
// become ready. It must not block.
func (n *Network) OnChange(call func()) { n.changed.Store(&call) }

// announce calls the function of OnChange.
func (n *Network) announce() {
	if call := n.changed.Load(); call != nil {
		(*call)()
	}
}

func (n *Network) askRefresh() {
	select {
	case n.refresh <- struct{}{}:
	default: // a wake-up is pending
	}
}

// Plan returns the attachment of a new pod, which the caller stores before [Network.Add]. It
// returns FailedPrecondition if there is no valid configuration. Plan ignores STATUS, because a
// plugin that is not ready refuses ADD.
func (n *Network) Plan() (Attachment, error) {
	v := n.view.Load()
	if v.net == nil {
		return Attachment{}, v.loadErr
	}
	return Attachment{Network: v.net.list.Name, IfName: IfName, ConfList: v.net.list.Bytes}, nil
}

// Info describes the network to the operator. Verbose Status prints it as JSON.
type Info struct {
	ConfDir    string    `json:"confDir"`
	BinDirs    []string  `json:"binDirs"`
	File       string    `json:"file,omitempty"`       // the configuration in use
	Network    string    `json:"network,omitempty"`    // its name
	CNIVersion string    `json:"cniVersion,omitempty"` // the specification version in use
	Plugins    []string  `json:"plugins,omitempty"`    // their types, in chain order
	Skipped    []Skipped `json:"skipped,omitempty"`    // invalid files that precede it
	Error      string    `json:"error,omitempty"`      // the reason why the network is not ready
	At         time.Time `json:"at"`                   // when the configuration was last read
}

// Skipped is an invalid configuration file.
type Skipped struct {
	File  string `json:"file"`
	Error string `json:"error"`
}

// Info returns the published view of the network.
func (n *Network) Info() Info {
	v := n.view.Load()
	info := Info{ConfDir: n.dirs.Load().conf, BinDirs: n.dirs.Load().bin, Skipped: v.skipped, At: v.at}
	if err := v.ready(); err != nil {
		info.Error = err.Error()
	}
	if v.net != nil {
		info.File, info.Network, info.CNIVersion = v.net.file, v.net.list.Name, v.net.list.CNIVersion
		for _, p := range v.net.list.Plugins {
			info.Plugins = append(info.Plugins, p.Network.Type)
		}
	}
	return info
}
