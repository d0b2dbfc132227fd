package statecheck

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"berth/cmd/node"
	"berth/sandbox/state"
)

// Several daemons may run on a machine, each with its own directories. Their records show which
// processes, network namespaces and addresses belong to other daemons.

// maxOthers bounds how many possible daemons are examined. Any process may have their name.
const maxOthers = 64

// readOthers finds the records of other berths through the programs of their monitors and the locks
// of their daemons. It looks at objects before records, as gather does.
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

// otherRoots returns directories that may be roots of other berths.
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
		if !node.IsDaemon(p.name) || pid == f.daemon || looked == maxOthers {
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

// isDaemons reports whether a directory may be a daemon's: only root can write to it and read it.
func isDaemons(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil || info.Mode() != os.ModeDir|0o700 {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stat.Uid == 0
}
