package shim

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"berth/internal/cgroup"
	"berth/internal/pidfd"
	"berth/internal/trace"
	"berth/shim/proto"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// takeFor returns a launcher for a launch. It takes an idle launcher only if the launcher sees the
// host's current mounts at two kinds of places. These are the sources of the spec's mounts, and the
// spec's pinned namespaces.
//
// A launcher has had its mount namespace since it started. Later mounts reach it only through
// shared mounts. A mount that became shared later has no peer in the launcher. A remount never
// propagates, for example the second step of a read-only bind mount. A launcher that lasts copies
// the mounts for each launch.
func (l *Launchers) takeFor(ctx context.Context, req *proto.Launch) (*launcher, error) {
	defer trace.Begin(ctx, "get launcher").End() // it may have to start one
	p, err := l.take(l.cfg.Warm, "", req.Pause != proto.PlainPause && !req.Lasts)
	sources := hostPaths(req.Spec)
	if err != nil || !l.cfg.Warm || req.Lasts || len(sources) == 0 {
		return p, err
	}
	same, err := sameView(p.pid, sources)
	if err != nil {
		l.cfg.Log.Warn("compare the mounts of a launcher with the host's; starting another", "pid", p.pid, "error", err)
	}
	if same {
		return p, nil
	}
	l.retire(p) // the pool's next launcher sees the current mounts
	return l.start()
}

// take returns an idle launcher, or starts one. execIn is the container of an exec, and empty for a
// launch. take skips launchers that have died while idle. With childless it skips those that are
// parents of containers: a restore, an OCI runtime or a future monitor take each child for theirs.
func (l *Launchers) take(mayBeIdle bool, execIn string, childless bool) (*launcher, error) {
	for mayBeIdle {
		p := l.pop(execIn, childless)
		if p == nil {
			break
		}
		done, err := pidfd.Exited(p.proc)
		if err == nil && !done {
			l.wantMore()
			return p, nil
		}
		l.losses.Add(1)
		l.cfg.Log.Warn("idle launcher died", "pid", p.pid, "error", err)
		l.retire(p)
		l.wantMore()
	}
	return l.start()
}

// pop removes a launcher from the pool and returns it, or nil if the pool has none.
func (l *Launchers) pop(execIn string, childless bool) *launcher {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 {
		return nil
	}
	at := l.choose(execIn)
	if childless && l.idle[at].parent {
		at = slices.IndexFunc(l.idle, func(p idleLauncher) bool { return !p.parent })
	}
	if at < 0 {
		return nil
	}
	return l.takeAt(at)
}

// choose returns the index of the best launcher. An exec prefers the launcher that has loaded its
// container. A launch prefers a launcher that has loaded no container.
//
// If there is no such launcher, an exec takes a launcher that has loaded no container, even if no
// other such launcher is left. Any launcher can launch, and probes come more often than launches.
// Otherwise an exec takes the launcher that has been idle longest. Probes of several containers
// then keep one launcher each. It takes no spare launcher, because a used launcher never becomes
// old enough to be retired.
//
// +checklocks:l.mu
func (l *Launchers) choose(execIn string) int {
	for i, p := range slices.Backward(l.idle) {
		if p.loaded == execIn {
			return i
		}
	}
	first := max(len(l.idle)-l.enough(), 0)
	unloaded := func(p idleLauncher) bool { return p.loaded == "" }
	return first + max(slices.IndexFunc(l.idle[first:], unloaded), 0)
}

// takeAt removes and returns the idle launcher at index i.
//
// +checklocks:l.mu
func (l *Launchers) takeAt(i int) *launcher {
	p := l.idle[i]
	l.idle = slices.Delete(l.idle, i, i+1)
	p.unwatch()
	return p.launcher
}

// hostPaths returns the host's paths that a spec uses: the sources of its mounts and the pins of
// its namespaces.
func hostPaths(spec *specs.Spec) []string {
	if spec == nil {
		return nil
	}
	var sources []string
	for _, m := range spec.Mounts {
		if isBind(m) {
			sources = append(sources, m.Source)
		}
	}
	if spec.Linux == nil {
		return sources
	}
	for _, ns := range spec.Linux.Namespaces {
		if ns.Path != "" {
			sources = append(sources, ns.Path)
		}
	}
	return sources
}

// isBind reports whether m binds a path of the host. The runtime-spec (config.md, Linux mount
// options) has bind and rbind as options. Mounts of CDI vendors and NRI plugins often have no type,
// or "none".
func isBind(m specs.Mount) bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// sameView returns whether a process sees the same mounts as we do at, above and below the sources.
func sameView(pid int, sources []string) (bool, error) {
	ours, err := viewOf("self", sources)
	if err != nil {
		return false, err
	}
	theirs, err := viewOf(strconv.Itoa(pid), sources)
	if err != nil {
		return false, err
	}
	return maps.Equal(ours, theirs), nil
}

// view counts the mounts above and below some paths, by their properties.
type view map[string]int

func viewOf(process string, sources []string) (view, error) {
	table, err := os.ReadFile("/proc/" + process + "/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	return viewIn(table, sources), nil
}

// viewIn returns the mounts around the sources from a mountinfo table (proc_pid_mountinfo(5)). A
// full node has some 500 lines, so it parses only the mount point of the other lines.
func viewIn(table []byte, sources []string) view {
	v := view{}
	for line := range bytes.Lines(table) {
		// ID, parent, device, root, mount point, options, optional fields, "-" and more
		_, line, _ = bytes.Cut(line, space)
		_, line, _ = bytes.Cut(line, space)
		device, rest, _ := bytes.Cut(line, space)
		root, rest, _ := bytes.Cut(rest, space)
		point, rest, _ := bytes.Cut(rest, space)
		above, below := around(unescape(point), sources)
		if !above && !below {
			continue
		}
		options, rest, _ := bytes.Cut(rest, space)
		peers, _, _ := bytes.Cut(rest, []byte("- "))
		key := fmt.Sprintf("%s %s %s %s", device, root, point, peers)
		if below { // above and at a source options do not count, because the spec sets them
			key += string(options)
		}
		v[key]++
	}
	return v
}

var space = []byte(" ")

// around returns whether a mount point is at or above one of the sources, and whether it is below
// one.
func around(point []byte, sources []string) (above, below bool) {
	for _, s := range sources {
		n := len(s)
		switch {
		case len(point) == n:
			above = above || string(point) == s
		case len(point) < n:
			above = above || (s[len(point)] == '/' || len(point) == 1) && s[:len(point)] == string(point)
		default:
			below = below || (point[n] == '/' || n == 1) && string(point[:n]) == s
		}
	}
	return above, below
}

// unescape undoes the kernel's octal escapes of space, tab, newline and backslash.
func unescape(path []byte) []byte {
	if bytes.IndexByte(path, '\\') < 0 {
		return path
	}
	var out []byte
	for i := 0; i < len(path); i++ {
		if path[i] == '\\' && i+3 < len(path) {
			if n, err := strconv.ParseUint(string(path[i+1:i+4]), 8, 8); err == nil {
				out = append(out, byte(n))
				i += 3
				continue
			}
		}
		out = append(out, path[i])
	}
	return out
}

const (
	// expectTime is how long a launch stays expected after Expect. expectNext is the same time
	// after a container's launch, because kubelet continues with the pod's next container. Each 100
	// ms take 2 ms of CPU time.
	expectTime = 100 * time.Millisecond
	expectNext = 25 * time.Millisecond
	// expectPace is shorter than an RCU grace period.
	expectPace = 5 * time.Millisecond
)

// Expect announces a launch within the next 100 ms. It returns at once. It is optional, and makes
// the launch faster by 5 to 20 ms. A Launch announces the next launches itself.
//
// Where init does not start in its cgroup, it is moved there. That waits for an RCU grace period
// unless another move happened just before. While a launch is expected, an idle launcher is moved
// to its own cgroup again and again (cgroup.Anchor), so that the launch does not wait.
func (l *Launchers) Expect() { l.expect() }

// expect is Expect. The caller calls done after the launch. This shortens the wait for the next
// launch.
func (l *Launchers) expect() (done func()) {
	if !l.moves {
		return func() {}
	}
	until := time.Now().Add(expectTime) // with its monotonic reading: the clock may be set
	l.expectUntil.Store(&until)
	if l.expecting.CompareAndSwap(false, true) {
		l.owned.Go(l.keepMovesFast)
	}
	return func() {
		next := time.Now().Add(expectNext)
		l.expectUntil.CompareAndSwap(&until, &next)
	}
}

// ExpectPause announces the launch of a pause. A plain pause may not have to move between cgroups.
// Then ExpectPause does nothing, because the first move delays all changes of cgroups, including
// the creation of the pause's cgroup. Launch announces the containers that follow.
func (l *Launchers) ExpectPause(kind proto.PauseKind) {
	if kind != proto.PlainPause || !cgroup.StartsInside(l.cfg.SystemdCgroup) {
		l.Expect()
	}
}

func (l *Launchers) keepMovesFast() {
	defer l.expecting.Store(false) // an Expect at this moment has no effect, and the launch is only slower
	var moved int                  // pid of the last moved launcher
	var stay *cgroup.Anchor
	for time.Now().Before(*l.expectUntil.Load()) {
		if pid := l.idlePID(); pid != 0 {
			var err error
			if pid != moved {
				stay, err = cgroup.AnchorOf(pid)
				moved = pid
			}
			if err == nil {
				err = stay.Move()
			}
			if err != nil {
				l.cfg.Log.Debug("prepare the kernel for a launch", "error", err)
				return
			}
		}
		select {
		case <-l.ctx.Done():
			return
		case <-time.After(expectPace):
		}
	}
}

// idlePID returns the pid of the launcher that has been idle longest, or 0.
func (l *Launchers) idlePID() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 || l.closed {
		return 0
	}
	return l.idle[0].pid
}
