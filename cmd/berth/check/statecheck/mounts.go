package statecheck

import (
	"path/filepath"
	"strings"
)

// Mounts: in the host's mount table there are, below the daemon's directories, the mounts that it
// makes for itself, and of each running pod its tmpfs and the pins of its namespaces: each once,
// and no others. What launchers mount stays in their own mount namespaces.

func compareMounts(f *facts, d *finder) {
	expected, allowed := f.expectedMounts()
	found := map[string]int{}
	for _, m := range f.mounts {
		if !f.isOurs(m.Mountpoint) || f.isPin(m.Mountpoint) && f.others[strings.TrimPrefix(filepath.Base(m.Mountpoint), filepath.Base(f.dirs.NetNS("")))] {
			continue
		}
		found[m.Mountpoint]++
		if _, ok := expected[m.Mountpoint]; !ok && !allowed[m.Mountpoint] {
			d.differ("mount at "+m.Mountpoint, "no mount", "%s of %s", m.FSType, m.Source)
		}
	}
	for point, object := range expected {
		switch n := found[point]; {
		case n == 0:
			d.differ(object, "a mount at "+point, "none")
		case n > 1 && !f.isPin(point): // who binds /run/netns on itself, as ip(8) does, doubles the pins in it
			d.differ(object, "one mount at "+point, "%d on top of each other", n)
		}
	}
}

// expectedMounts returns the mount points that must be in the table, with the object that each
// belongs to, and those that may be.
func (f *facts) expectedMounts() (expected map[string]string, allowed map[string]bool) {
	expected, allowed = map[string]string{}, map[string]bool{}
	for _, point := range []string{f.node.State, f.dirs.SharedMounts(), f.dirs.RootPlace()} {
		point = f.realPath(point)
		allowed[point] = true // a daemon that stops leaves them to its containers
		if f.daemon != 0 {
			expected[point] = "the daemon"
		}
	}
	for _, p := range f.pods {
		for _, point := range []string{p.Tmpfs, p.NetNS, p.UserNS} {
			if point == "" || f.podIsOver(p) {
				continue
			}
			point = f.realPath(point)
			allowed[point] = true
			if f.podRuns(p) {
				expected[point] = podName(p.ID)
			}
		}
	}
	return expected, allowed
}

// isOurs tells whether what is mounted there concerns berth. A directory of root may be a
// filesystem of its own, and root too.
func (f *facts) isOurs(point string) bool {
	root, state, place := f.realPath(f.node.Root), f.realPath(f.node.State), f.realPath(f.dirs.RootPlace())
	if below, ok := strings.CutPrefix(point, root+"/"); ok && strings.Contains(below, "/") {
		return true
	}
	for _, dir := range []string{state, place} {
		if point == dir || strings.HasPrefix(point, dir+"/") {
			return true
		}
	}
	return f.isPin(point)
}

func (f *facts) isPin(point string) bool {
	return strings.HasPrefix(point, filepath.Join(f.realPath(f.node.NetNSDir), filepath.Base(f.dirs.NetNS(""))))
}

// realPath is how the mount table names a path: the directories on the way may be links, such as
// /var/run. What does not exist is left as it is.
func (f *facts) realPath(path string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return filepath.Clean(path)
	}
	return filepath.Join(dir, filepath.Base(path))
}
