package shim

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// takeFor returns a launcher for a launch. It takes an idle one only if that sees the host's
// current mounts at the sources of the spec's mounts and at its pinned namespaces.
//
// A launcher has had its mount namespace since it started. Later mounts reach it only through
// shared mounts. A mount that became shared later has no peer in the launcher. A remount never
// propagates, for example the second step of a read-only bind mount.
func (l *Launchers) takeFor(spec *specs.Spec) (*launcher, error) {
	p, err := l.take(l.cfg.Warm, "")
	sources := hostPaths(spec)
	if err != nil || !l.cfg.Warm || len(sources) == 0 {
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
// options) has bind and rbind as options, and mounts of CDI vendors and NRI plugins often have no
// type or "none".
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

// view counts the mounts around some paths.
type view map[string]int

func viewOf(process string, sources []string) (view, error) {
	table, err := os.ReadFile("/proc/" + process + "/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	return viewIn(table, sources), nil
}

// viewIn returns the mounts around the sources from a mountinfo table (proc_pid_mountinfo(5)). A
// full node has some 500 lines, so it parses only the mount point of others.
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
		if below { // for the mount that holds a source the spec sets them
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
