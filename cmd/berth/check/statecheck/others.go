package statecheck

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"berth/sandbox/state"
)

// Several berths may run on a machine, with directories of their own. What they have recorded is
// none of this one's: its processes may be in cgroups beside ours, its network namespaces and
// addresses in the same directories.

// maxOthers bounds how many processes are looked at that may be other daemons: any process may have
// their name.
const maxOthers = 64

// readOthers finds the records of other berths: by the programs of their monitors, and by the locks
// of their daemons. Things before records, as in gather.
func (f *facts) readOthers() error {
	f.others = map[string]bool{}
	own := f.realPath(f.node.Root)
	for root := range f.otherRoots() {
		if root == own || !isDaemons(root) {
			continue
		}
		ids, err := state.IDs(root)
		if err != nil {
			return err
		}
		for _, id := range ids {
			f.others[id] = true
		}
	}
	return nil
}

// otherRoots are directories that may be roots of berths.
func (f *facts) otherRoots() map[string]bool {
	roots := map[string]bool{}
	looked := 0
	for _, pid := range slices.Sorted(maps.Keys(f.processes)) {
		p := f.processes[pid]
		if p.isMonitor() {
			if at := strings.LastIndex(p.exe, "/bin/"); at > 0 {
				roots[p.exe[:at]] = true
			}
		}
		if p.name != daemonName || pid == f.daemon || looked == maxOthers {
			continue
		}
		looked++
		for _, link := range f.linksOf(strconv.Itoa(pid), firstDescriptors) {
			if filepath.Base(link.target) == "lock" {
				roots[filepath.Dir(link.target)] = true
			}
		}
	}
	return roots
}

// isDaemons tells whether a directory may be a daemon's: others than root can neither make nor read
// those.
func isDaemons(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil || info.Mode() != os.ModeDir|0o700 {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stat.Uid == 0
}
