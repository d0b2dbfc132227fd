package statecheck

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/sandbox/state"
)

// Network namespaces: each namespace pinned under berth's name belongs to a recorded pod whose
// network exists. The namespaces of each running pod are pinned, and its pause is in them.
// The same applies to user namespaces.

func (f *facts) readNamespaces() error {
	names, err := namesIn(f.node.NetNSDir)
	if err != nil {
		return fmt.Errorf("read network namespaces: %w", err)
	}
	for _, name := range names {
		if path := filepath.Join(f.node.NetNSDir, name); strings.HasPrefix(path, f.dirs.NetNS("")) {
			f.netns = append(f.netns, path)
		}
	}
	return nil
}

func compareNamespaces(f *facts, d *finder) {
	for _, path := range f.netns {
		id := strings.TrimPrefix(path, f.dirs.NetNS(""))
		switch p := f.pods[id]; {
		case p == nil && f.others[id]: // several berths may use the same directory
		case p == nil || p.NetNS != path:
			d.differ(path, "a recorded pod with this network namespace", "none")
		case f.podIsOver(p):
			d.differ(podName(id), "no network namespace, since the pod was stopped", "%s", path)
		}
	}
	for _, p := range f.pods {
		if f.podRuns(p) {
			f.comparePin(d, p, "network", "net", p.NetNS)
			f.comparePin(d, p, "user", "user", p.UserNS)
		}
	}
}

// comparePin compares a namespace of a running pod.
func (f *facts) comparePin(d *finder, p *state.FoundPod, kind, file, path string) {
	if path == "" {
		return
	}
	pinned, err := namespaceAt(path)
	if err != nil {
		d.differ(podName(p.ID), fmt.Sprintf("a %s namespace pinned at %s", kind, path), "%v", err)
		return
	}
	if p.Program || f.alive(p.PausePID, p.PauseStart) == nil { // a runtime's program may run its pause elsewhere
		return
	}
	its, err := os.Stat(f.procFile(strconv.Itoa(p.PausePID), "ns", file))
	if err != nil {
		return // it has just ended
	}
	if inode := its.Sys().(*syscall.Stat_t).Ino; inode != pinned {
		d.differ(podName(p.ID), fmt.Sprintf("its pause in the %s namespace pinned at %s", kind, path),
			"it in %s:[%d], and %d there", file, inode, pinned)
	}
}

// namespaceAt returns the inode number of the namespace pinned at path.
func namespaceAt(path string) (uint64, error) {
	var where unix.Statfs_t
	err := unix.Statfs(path, &where)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errors.New("nothing")
	}
	if err != nil {
		return 0, err
	}
	if where.Type != unix.NSFS_MAGIC {
		return 0, errors.New("not a namespace")
	}
	var st unix.Stat_t
	err = unix.Stat(path, &st)
	return st.Ino, err
}
