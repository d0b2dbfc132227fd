package cni

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc/codes"

	"berth/cni/berthnet"
	"berth/internal/errdefs"
)

const (
	// settleQuiet and settleMax make one reload of a burst of changes: a file that
	// is being written is not valid until its writer is done.
	settleQuiet = 100 * time.Millisecond
	settleMax   = time.Second
)

// view is what the owner goroutine knows about the network. Immutable.
type view struct {
	net     *network  // nil: no valid configuration
	skipped []Skipped // invalid files before net's
	loadErr error     // why net is nil
	missing error     // a plugin that is not installed
	judged  bool      // STATUS has been asked, or does not exist in net's version
	verdict error     // its outcome
	at      time.Time // when the directory was last looked at

	obstacles   []berthnet.Obstacle // what pods of berth-net would meet
	obstaclesAt time.Time           // when they were last looked for, with success or not
	obstaclesOf *[][]IPRange        // for pods with which addresses
}

func (v *view) ready() error {
	switch {
	case v.net == nil:
		return v.loadErr
	case v.missing != nil:
		return v.missing
	case !v.judged:
		return errdefs.Unavailable("CNI network %q: waiting for the plugins' STATUS", v.net.list.Name)
	}
	return v.verdict
}

// owner is the goroutine that keeps a Network's view. Nothing else touches its
// fields, and nothing else writes the view.
type owner struct {
	n   *Network
	ctx context.Context // ends with Close

	watch    *watcher // nil: no inotify, Status makes the owner look
	events   <-chan fsnotify.Event
	errs     <-chan error
	watchErr string // the last failure to watch, logged once

	settle     <-chan time.Time // fires when a burst of changes is over
	burstSince time.Time

	probing  *network // whose STATUS is being asked; nil: nobody's
	endProbe context.CancelFunc
	verdicts chan verdict

	looking bool   // for obstacles
	lookErr string // why that failed the last time, logged once
	sights  chan sight
}

// verdict is the outcome of one round of STATUS.
type verdict struct {
	net    *network
	ranges *[][]IPRange // that it is about
	err    error
}

func newOwner(ctx context.Context, n *Network) *owner {
	o := &owner{n: n, ctx: ctx, verdicts: make(chan verdict), sights: make(chan sight)}
	if n.cfg.List != nil {
		return o // there is nothing to watch
	}
	w, err := newWatcher(n.cfg.ConfDir)
	if err != nil {
		n.log.Warn("CNI configuration is not watched, changes are seen when the status is asked; fs.inotify.max_user_instances may be too low",
			"dir", n.cfg.ConfDir, "error", err)
		return o
	}
	o.watch, o.events, o.errs = w, w.fs.Events, w.fs.Errors
	return o
}

func (o *owner) run() {
	defer o.close()
	for {
		select {
		case <-o.ctx.Done():
			return
		case ev := <-o.events:
			if o.watch.concerns(ev) {
				o.changed()
			}
		case err := <-o.errs:
			// An overflow lost events; look at everything again.
			o.n.log.Warn("watch CNI configuration", "dir", o.n.cfg.ConfDir, "error", err)
			o.changed()
		case <-o.settle:
			o.settle = nil
			o.reload()
		case <-o.n.refresh:
			o.reload()
			o.probe()
		case v := <-o.verdicts:
			o.judge(v)
		case s := <-o.sights:
			o.see(s)
		}
	}
}

func (o *owner) close() {
	if o.endProbe != nil {
		o.endProbe()
	}
	if o.watch != nil {
		if err := o.watch.fs.Close(); err != nil {
			o.n.log.Warn("close CNI configuration watch", "error", err)
		}
	}
}

// changed schedules a reload for when the burst of changes is over.
func (o *owner) changed() {
	now := time.Now()
	if o.settle == nil {
		o.burstSince = now
	}
	o.settle = time.After(min(settleQuiet, o.burstSince.Add(settleMax).Sub(now)))
}

// reload looks at the directory and publishes what it finds. A changed network
// has its STATUS asked.
func (o *owner) reload() {
	o.syncWatch()
	old := o.n.view.Load()
	if old == nil {
		old = &view{}
	}
	v := &view{at: time.Now()}
	v.net, v.skipped, v.loadErr = o.n.configured()
	if v.net.same(old.net) {
		v.net, v.judged, v.verdict = old.net, old.judged, old.verdict
		v.obstacles, v.obstaclesAt, v.obstaclesOf = old.obstacles, old.obstaclesAt, old.obstaclesOf
	}
	if v.net != nil {
		v.missing = o.n.findPlugins(v.net.list)
		v.judged = v.judged || !supports11(v.net.list)
	}
	o.n.view.Store(v)
	o.logChanges(old, v)
	if v.net != old.net {
		o.probe()
	}
}

func (o *owner) syncWatch() {
	if o.watch == nil {
		return
	}
	err := o.watch.sync()
	if err == nil {
		o.watchErr = ""
		return
	}
	if err.Error() != o.watchErr {
		o.watchErr = err.Error()
		o.n.log.Warn("CNI configuration is not watched, changes are seen when the status is asked", "dir", o.n.cfg.ConfDir, "error", err)
	}
}

// findPlugins returns an error, FailedPrecondition, for the first plugin of the
// chain that is not installed: every ADD would fail.
func (n *Network) findPlugins(list *libcni.NetworkConfigList) error {
	for _, p := range list.Plugins {
		if _, err := n.plugins.FindInPath(p.Network.Type, n.cfg.BinDirs); err != nil {
			return errdefs.FailedPrecondition("CNI network %q: %w", list.Name, err)
		}
	}
	return nil
}

func (o *owner) logChanges(old, v *view) {
	for _, s := range v.skipped {
		if !slices.Contains(old.skipped, s) {
			o.n.log.Warn("invalid CNI configuration skipped", "file", s.File, "error", s.Error)
		}
	}
	switch {
	case v.net != nil && v.net != old.net:
		o.n.log.Info("CNI network configured", "network", v.net.list.Name, "file", v.net.file, "cniVersion", v.net.list.CNIVersion)
	case v.net == nil && old.net != nil:
		o.n.log.Warn("CNI network gone", "network", old.net.list.Name, "error", v.loadErr)
	}
	if v.missing != nil && (old.missing == nil || old.missing.Error() != v.missing.Error()) {
		o.n.log.Warn("CNI network not ready", "error", v.missing)
	}
}

// probe asks the plugins for their STATUS in a goroutine of its own, one at a
// time. A probe of a network that is no longer current is ended.
func (o *owner) probe() {
	view := o.n.view.Load()
	net := view.net
	if o.probing != nil && o.probing != net {
		o.endProbe()
		o.probing = nil
	}
	if net == nil || o.probing != nil || !supports11(net.list) {
		return
	}
	ctx, cancel := context.WithTimeout(o.ctx, statusTimeout)
	o.probing, o.endProbe = net, cancel
	o.n.done.Go(func() {
		defer cancel()
		v := verdict{net: net, ranges: o.n.ranges.Load()}
		v.err = o.n.askStatus(ctx, net.list, v.ranges)
		if v.err != nil && view.judged && view.verdict == nil && ctx.Err() == nil {
			v.err = o.n.askStatus(ctx, net.list, v.ranges) // a node is not taken out of service for what passes
		}
		select {
		case o.verdicts <- v:
		case <-o.ctx.Done():
		}
	})
}

// judge publishes a verdict, unless its network is no longer current.
func (o *owner) judge(v verdict) {
	if v.net != o.probing {
		return
	}
	o.probing = nil
	if v.ranges != o.n.ranges.Load() {
		o.probe()
		return
	}
	old := o.n.view.Load()
	now := *old
	now.judged, now.verdict = true, v.err
	o.n.view.Store(&now)
	switch {
	case v.err != nil && (old.verdict == nil || old.verdict.Error() != v.err.Error()):
		o.n.log.Warn("CNI network not ready", "network", v.net.list.Name, "error", v.err)
	case v.err == nil && old.verdict != nil:
		o.n.log.Info("CNI network ready", "network", v.net.list.Name)
	}
	o.look()
}

// askStatus runs STATUS for every plugin of the chain, with ranges of addresses where they know that capability; plugins that do not know
// the verb count as healthy.
func (n *Network) askStatus(ctx context.Context, list *libcni.NetworkConfigList, ranges *[][]IPRange) error {
	for _, p := range list.Plugins {
		err := n.runVerb(ctx, list, p, "STATUS", withRanges(p, ranges))
		if err != nil && !errors.Is(err, errVerbUnknown) {
			return errdefs.New(codes.Unavailable, "CNI network %q: STATUS: %w", list.Name, err)
		}
	}
	return nil
}

// withRanges is what a plugin's configuration has more where ranges of addresses are given, and it knows that capability.
func withRanges(p *libcni.PluginConfig, ranges *[][]IPRange) map[string]any {
	if ranges == nil || len(*ranges) == 0 || !p.Network.Capabilities[capIPRanges] {
		return nil
	}
	return map[string]any{"runtimeConfig": map[string]any{capIPRanges: *ranges}}
}
