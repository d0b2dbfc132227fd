package cni

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	// settleQuiet and settleMax combine a burst of changes into one reload, because a half-written
	// file is invalid.
	settleQuiet = 100 * time.Millisecond
	settleMax   = time.Second
)

// view is the immutable state of the network that the owner publishes.
type view struct {
	net     *network  // nil: no valid configuration
	skipped []Skipped // invalid files before net's
	loadErr error     // the reason if net is nil
	missing error     // a plugin that is not installed
	plugins []program // paths of the plugins in net's chain; nil if a plugin is missing

	versioned  bool      // VERSION of plugins has run
	versionErr error     // a plugin is too old
	at         time.Time // when the directory was last read

	asked     bool  // STATUS has run, or net's version has no STATUS
	statusErr error // the error of STATUS
}

func (v *view) ready() error {
	switch {
	case v.net == nil:
		return v.loadErr
	case v.missing != nil:
		return v.missing
	case v.versionErr != nil:
		return v.versionErr
	case !v.asked:
		return errdefs.Unavailable("CNI network %q: STATUS still runs", v.net.list.Name)
	}
	return v.statusErr
}

// owner is the goroutine that maintains a Network's view. No other goroutine accesses its fields or
// writes the view.
type owner struct {
	n   *Network
	ctx context.Context // ends with Close

	watch    *watcher // nil: no inotify instance, so only Status triggers a reload
	events   <-chan fsnotify.Event
	errs     <-chan error
	watchErr string // the last failure to watch; it is logged once

	settle     <-chan time.Time // fires when a burst of changes is over
	burstSince time.Time

	probing  *network // the network whose STATUS runs; nil: none
	endProbe context.CancelFunc
	statuses chan status
}

// status is the result of one round of VERSION and STATUS.
type status struct {
	net        *network
	plugins    []program    // the plugins that VERSION ran
	versionErr error        // a plugin is too old
	ranges     *[][]IPRange // the ranges that STATUS got
	err        error
}

func newOwner(ctx context.Context, n *Network) *owner {
	o := &owner{n: n, ctx: ctx, statuses: make(chan status)}
	o.openWatch()
	return o
}

// openWatch watches the directory of configurations. It logs a failure.
func (o *owner) openWatch() {
	n := o.n
	if n.cfg.List != nil {
		return // a fixed list needs no watch
	}
	w, err := newWatcher(n.dirs.Load().conf)
	if err != nil {
		n.log.Warn("CNI configuration directory cannot be watched, changes are detected only when kubelet asks for the "+
			"status; raise fs.inotify.max_user_instances",
			"dir", n.dirs.Load().conf, "error", err)
		return
	}
	o.watch, o.events, o.errs = w, w.fs.Events, w.fs.Errors
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
			// If the queue overflowed, events are lost, and everything is reloaded.
			o.n.log.Warn("watch CNI configuration", "dir", o.n.dirs.Load().conf, "error", err)
			o.changed()
		case <-o.settle:
			o.settle = nil
			o.refresh()
		case <-o.n.refresh:
			if o.settle == nil { // otherwise the refresh follows after the burst of changes
				o.refresh()
			}
		case <-o.n.moved:
			o.closeWatch()
			o.openWatch()
			o.reload()
		case s := <-o.statuses:
			o.endStatus(s)
		}
	}
}

// refresh reads the directory and asks the plugins. The round ends when they have answered.
func (o *owner) refresh() {
	o.reload()
	o.probe()
	if o.probing == nil {
		o.n.endRound()
	}
}

func (o *owner) close() {
	if o.endProbe != nil {
		o.endProbe()
	}
	o.closeWatch()
}

func (o *owner) closeWatch() {
	if o.watch == nil {
		return
	}
	if err := o.watch.fs.Close(); err != nil {
		o.n.log.Warn("close CNI configuration watch", "error", err)
	}
	o.watch, o.events, o.errs = nil, nil, nil
}

// changed schedules a reload after the burst of changes.
func (o *owner) changed() {
	now := time.Now()
	if o.settle == nil {
		o.burstSince = now
	}
	o.settle = time.After(min(settleQuiet, o.burstSince.Add(settleMax).Sub(now)))
}

// reload reads the directory and publishes the result. A changed network triggers STATUS.
func (o *owner) reload() {
	o.syncWatch()
	old := o.n.view.Load()
	if old == nil {
		old = &view{}
	}
	v := &view{at: time.Now()}
	v.net, v.skipped, v.loadErr = o.n.configured()
	if v.net.same(old.net) {
		v.net, v.asked, v.statusErr = old.net, old.asked, old.statusErr
		v.plugins, v.versioned, v.versionErr = old.plugins, old.versioned, old.versionErr
	}
	if v.net != nil {
		var plugins []program
		plugins, v.missing = o.n.findPlugins(v.net.list)
		if !slices.Equal(plugins, v.plugins) {
			v.plugins, v.versioned, v.versionErr = plugins, false, nil
		}
		v.asked = v.asked || !supports11(v.net.list)
	}
	o.n.view.Store(v)
	o.logChanges(old, v)
	if v.net != old.net || v.missing == nil && old.missing != nil {
		o.n.announce()
	}
	if v.net != old.net || !v.versioned {
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
		o.n.log.Warn("CNI configuration directory cannot be watched, changes are detected only when kubelet asks for the "+
			"status", "dir", o.n.dirs.Load().conf, "error", err)
	}
}

func (o *owner) logChanges(old, v *view) {
	for _, s := range v.skipped {
		if !slices.Contains(old.skipped, s) {
			o.n.log.Warn("invalid CNI configuration skipped", "file", s.File, "error", s.Error)
		}
	}
	switch {
	case v.net != nil && v.net != old.net:
		o.n.log.Info("CNI network configured", "network", v.net.list.Name, "file", v.net.file,
			"cniVersion", v.net.list.CNIVersion)
	case v.net == nil && old.net != nil:
		o.n.log.Warn("CNI network is no longer configured", "network", old.net.list.Name, "error", v.loadErr)
	}
	switch {
	case v.missing != nil && (old.missing == nil || old.missing.Error() != v.missing.Error()):
		o.n.log.Warn("CNI network not ready", "error", v.missing)
	case v.missing == nil && old.missing != nil && v.net != nil:
		o.n.log.Info("CNI network ready: its plugins are installed", "network", v.net.list.Name)
	}
}

// probe runs VERSION, unless it has run with the same programs, and STATUS in a goroutine, one
// round at a time. A round of a network that is no longer current is cancelled.
func (o *owner) probe() {
	view := o.n.view.Load()
	net := view.net
	if o.probing != nil && o.probing != net {
		o.endProbe()
		o.probing = nil
	}
	if net == nil || o.probing != nil || view.missing != nil || view.versioned && !supports11(net.list) {
		return
	}
	ctx, cancel := context.WithTimeout(o.ctx, statusTimeout)
	o.probing, o.endProbe = net, cancel
	o.n.done.Go(func() {
		defer cancel()
		s := status{net: net, plugins: view.plugins, versionErr: view.versionErr, ranges: o.n.ranges.Load()}
		if !view.versioned {
			s.versionErr = checkVersions(ctx, net.list, view.plugins)
		}
		if supports11(net.list) {
			s.err = o.n.askStatus(ctx, net.list, s.ranges)
		}
		if s.err != nil && view.asked && view.statusErr == nil && ctx.Err() == nil {
			s.err = o.n.askStatus(ctx, net.list, s.ranges) // retries, because a transient error must not make the node NotReady
		}
		select {
		case o.statuses <- s:
		case <-o.ctx.Done():
		}
	})
}

// endStatus publishes the result of STATUS, unless its network is no longer current. It runs STATUS
// again if the ranges have changed meanwhile.
func (o *owner) endStatus(s status) {
	if s.net != o.probing {
		return
	}
	o.probing = nil
	if s.ranges != o.n.ranges.Load() {
		o.probe()
		return
	}
	old := o.n.view.Load()
	if !slices.Equal(s.plugins, old.plugins) { // replaced meanwhile
		o.probe()
		return
	}
	now := *old
	now.versioned, now.versionErr = true, s.versionErr
	now.asked, now.statusErr = true, s.err
	o.n.view.Store(&now)
	was, is := errors.Join(old.versionErr, old.statusErr), errors.Join(s.versionErr, s.err)
	switch {
	case is != nil && (was == nil || was.Error() != is.Error()):
		o.n.log.Warn("CNI network not ready", "network", s.net.list.Name, "error", is)
	case is == nil && was != nil:
		o.n.log.Info("CNI network ready", "network", s.net.list.Name)
		o.n.announce()
	}
	o.n.endRound()
}

// askStatus runs STATUS for each plugin of the chain. A plugin that does not know the verb counts
// as ready.
func (n *Network) askStatus(ctx context.Context, list *libcni.NetworkConfigList, ranges *[][]IPRange) error {
	for _, p := range list.Plugins {
		err := n.runVerb(ctx, list, p, "STATUS", rangesConfig(p, ranges))
		if err != nil && !errors.Is(err, errVerbUnknown) {
			return errdefs.New(codes.Unavailable, "CNI network %q: STATUS: %w", list.Name, err)
		}
	}
	return nil
}

// rangesConfig returns the configuration keys that pass ranges to a plugin with that capability.
func rangesConfig(p *libcni.PluginConfig, ranges *[][]IPRange) map[string]any {
	if ranges == nil || len(*ranges) == 0 || !p.Network.Capabilities[capIPRanges] {
		return nil
	}
	return map[string]any{"runtimeConfig": map[string]any{capIPRanges: *ranges}}
}
