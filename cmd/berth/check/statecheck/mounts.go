package statecheck

import (
	"path/filepath"
	"strings"

	"berth/cmd/config"
)

// Mounts: below the daemon's directories the host has the daemon's own mounts, and each running
// pod's tmpfs and pinned namespaces. Each exists once. Volumes of pods of "berth run" may be
// mounts, too. The host has no other mounts there. Launchers mount in their own mount namespaces.

func compareMounts(f *facts, d *finder) {
	expected, allowed := f.expectedMounts()
	found := map[string]int{}
	for _, m := range f.mounts {
		if !f.isOurs(m.Mountpoint) ||
			f.isPin(m.Mountpoint) && f.others[strings.TrimPrefix(filepath.Base(m.Mountpoint), filepath.Base(f.dirs.NetNS("")))] {
			continue
		}
		found[m.Mountpoint]++
		if _, ok := expected[m.Mountpoint]; !ok && !allowed[m.Mountpoint] && !f.isVolume(m.Mountpoint) {
			d.differ("mount at "+m.Mountpoint, "no mount", "%s of %s", m.FSType, m.Source)
		}
	}
	for point, object := range expected {
		switch n := found[point]; {
		case n == 0:
			d.differ(object, "a mount at "+point, "none")
		case n > 1 && !f.isPin(point): // binding /run/netns on itself, as ip(8) does, duplicates the pins in it
			d.differ(object, "one mount at "+point, "%d on top of each other", n)
		}
	}
}

// expectedMounts returns the mount points that must exist, with the object of each, and further
// mount points that may exist.
func (f *facts) expectedMounts() (expected map[string]string, allowed map[string]bool) {
	expected, allowed = map[string]string{}, map[string]bool{}
	for _, point := range []string{f.node.State, f.dirs.SharedMounts(), f.dirs.RootPlace()} {
		point = f.realPath(point)
		allowed[point] = true // a daemon that stops leaves these mounts to its containers
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

// isOurs reports whether a mount concerns berth. Root, and a directory in it, may be a separate
// filesystem.
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

// isVolume reports whether a mount is a volume of an existing pod of "berth run", or a part of such
// a volume. These pods have their files below root.
func (f *facts) isVolume(point string) bool {
	below, ok := strings.CutPrefix(point, filepath.Join(f.realPath(f.node.Root), config.RunDir)+"/")
	if !ok {
		return false
	}
	uid, _, _ := strings.Cut(below, "/")
	for _, p := range f.pods {
		if p.Config.GetMetadata().GetUid() == uid {
			return true
		}
	}
	return false
}

func (f *facts) isPin(point string) bool {
	return strings.HasPrefix(point, filepath.Join(f.realPath(f.node.NetNSDir), filepath.Base(f.dirs.NetNS(""))))
}

// realPath resolves the links in a path, such as /var/run, because the mount table contains
// resolved paths. It leaves missing parts unchanged.
func (f *facts) realPath(path string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return filepath.Clean(path)
	}
	return filepath.Join(dir, filepath.Base(path))
}
