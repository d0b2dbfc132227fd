package reset

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni/berthnet"
	"berth/image"
	"berth/internal/host"
	"berth/oci/confine"
	"berth/sandbox/ownership"
	"berth/sandbox/state"
)

// found lists everything that berth has on this node, each thing as one line of text.
type found struct {
	pods    []string
	images  int
	network []string // devices and tables of the built-in network
	mounts  []string // mount points, innermost last
	pins    []string // files of network namespaces
	profile bool     // whether the AppArmor profile is loaded
	dirs    []string // directories and files
}

// survey looks at the records and at the machine. It changes nothing and needs no daemon.
func survey(cfg *config.Config) (*found, error) {
	f := &found{}
	for _, step := range []func(*config.Config) error{
		f.readPods, f.readImages, f.readNetwork, f.readMounts, f.readPins, f.readProfile, f.readDirs,
	} {
		if err := step(cfg); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *found) readPods(cfg *config.Config) error {
	records, err := state.Inspect(cfg.Root, cfg.State)
	if err != nil {
		return err
	}
	containers := map[string]int{}
	for _, c := range records.Containers {
		containers[c.PodID]++
	}
	for id, p := range records.Pods {
		m := p.Config.GetMetadata()
		f.pods = append(f.pods, fmt.Sprintf("pod %s/%s (%.12s, containers: %d)", m.GetNamespace(), m.GetName(), id,
			containers[id]))
		delete(containers, id)
	}
	slices.Sort(f.pods)
	for _, id := range slices.Sorted(maps.Keys(containers)) {
		f.pods = append(f.pods, fmt.Sprintf("%d containers of the unknown pod %.12s", containers[id], id))
	}
	unknown, err := ownership.Unknown(dirs(cfg))
	for _, l := range unknown {
		f.pods = append(f.pods, fmt.Sprintf("a pod or container that root does not know (%.12s, process %d)", l.ID, l.Init))
	}
	return err
}

func (f *found) readImages(cfg *config.Config) error {
	images, _, err := image.ReadRecords(filepath.Join(cfg.Root, "images"))
	f.images = len(images)
	return err
}

func (f *found) readNetwork(cfg *config.Config) (err error) {
	f.network, err = berthnet.Installed(node.OwnNet(cfg).Key())
	return err
}

// readMounts finds the mounts below berth's directories. Root and state may themselves be mounts
// that the administrator made, which stay.
func (f *found) readMounts(cfg *config.Config) error {
	all, err := mountinfo.GetMounts(nil)
	if err != nil {
		return fmt.Errorf("read mounts: %w", err)
	}
	f.mounts = mountsOf(cfg, all)
	return nil
}

// mountsOf returns the mount points of berth among all mounts, innermost last.
func mountsOf(cfg *config.Config, all []*mountinfo.Info) (points []string) {
	root, run, place := resolved(cfg.Root), resolved(cfg.State), resolved(rootPlace(cfg))
	for i, m := range all {
		switch {
		case isBelow(m.Mountpoint, root), isBelow(m.Mountpoint, run), isBelow(m.Mountpoint, place):
			points = append(points, m.Mountpoint)
		case (m.Mountpoint == run || m.Mountpoint == place) && isBindOnItself(m, all[:i]):
			points = append(points, m.Mountpoint)
		}
	}
	return points
}

// isBindOnItself reports whether a mount shows a directory of the mount that it covers.
func isBindOnItself(m *mountinfo.Info, before []*mountinfo.Info) bool {
	for _, parent := range before {
		if parent.ID == m.Parent {
			return parent.Major == m.Major && parent.Minor == m.Minor &&
				m.Root == filepath.Join(parent.Root, strings.TrimPrefix(m.Mountpoint, parent.Mountpoint))
		}
	}
	return false
}

func isBelow(path, dir string) bool { return strings.HasPrefix(path, dir+"/") }

// resolved returns path without symbolic links. The kernel lists mount points in this form.
func resolved(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return path
}

func rootPlace(cfg *config.Config) string { return state.Dirs{State: cfg.State}.RootPlace() }

// readPins finds network namespaces that no pod of another berth has.
func (f *found) readPins(cfg *config.Config) error {
	ids, err := state.IDs(cfg.Root)
	if err != nil {
		return err
	}
	for _, id := range ids {
		pin := state.Dirs{NetNSs: cfg.NetNSDir}.NetNS(id)
		if _, err := os.Lstat(pin); err == nil {
			f.pins = append(f.pins, pin)
		}
	}
	return nil
}

// readProfile looks for the AppArmor profile. A process that uses it belongs to another berth, or
// to one of the pods.
func (f *found) readProfile(*config.Config) (err error) {
	f.profile, err = host.Files{}.AppArmorLoaded(confine.DefaultAppArmorProfile)
	if errors.Is(err, fs.ErrNotExist) { // the kernel has no AppArmor
		return nil
	}
	if f.profile && profileIsUsed() && len(f.pods) == 0 {
		f.profile = false
	}
	return err
}

// profileIsUsed reports whether a process is confined by the profile.
func profileIsUsed() bool {
	labels, _ := filepath.Glob("/proc/[0-9]*/attr/current") // the pattern is valid
	return slices.ContainsFunc(labels, func(path string) bool {
		label, err := os.ReadFile(path)
		return err == nil && bytes.HasPrefix(label, []byte(confine.DefaultAppArmorProfile+" ("))
	})
}

func (f *found) readDirs(cfg *config.Config) error {
	for _, path := range directories(cfg) {
		names, err := os.ReadDir(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		case len(names) > 0 || !stays(path):
			f.dirs = append(f.dirs, path)
		}
	}
	return nil
}

// directories are berth's directories, with everything in them.
func directories(cfg *config.Config) []string {
	return []string{cfg.Root, cfg.State, rootPlace(cfg)}
}

// stays reports whether the administrator has made the directory. That is so if it is a mount
// point, or if path is a symbolic link to it.
func stays(path string) bool {
	if target, err := os.Readlink(path); err == nil && target != "" {
		return true
	}
	mounted, err := mountinfo.Mounted(path)
	return err == nil && mounted
}

func (f *found) empty() bool { return len(f.lines()) == 0 }

// lines describes all things, in the order of their removal.
func (f *found) lines() []string {
	lines := slices.Clone(f.pods)
	if f.images > 0 {
		lines = append(lines, fmt.Sprintf("images: %d", f.images))
	}
	lines = append(lines, f.network...)
	for _, m := range slices.Backward(f.mounts) {
		lines = append(lines, "mount "+m)
	}
	for _, p := range f.pins {
		lines = append(lines, "network namespace "+p)
	}
	if f.profile {
		lines = append(lines, "AppArmor profile "+confine.DefaultAppArmorProfile)
	}
	for _, d := range f.dirs {
		lines = append(lines, "directory "+d)
	}
	return lines
}

// print writes the list. pid is the running daemon's, 0 for none.
func (f *found) print(w io.Writer, pid int) error {
	var text strings.Builder
	if f.empty() {
		text.WriteString("Berth has nothing on this node.\n")
	} else {
		text.WriteString("Berth has on this node:\n")
	}
	if pid != 0 {
		fmt.Fprintf(&text, "  daemon, process %d\n", pid)
	}
	for _, line := range f.lines() {
		fmt.Fprintf(&text, "  %s\n", line)
	}
	_, err := io.WriteString(w, text.String())
	return err
}
