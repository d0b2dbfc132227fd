package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"berth/internal/failpoint"
)

// delegated returns the names of the files that the owner of a delegated cgroup may write
// (cgroups(7)).
func delegated() ([]string, error) {
	names, err := os.ReadFile("/sys/kernel/cgroup/delegate")
	if err != nil {
		return nil, fmt.Errorf("find the files of delegated cgroups: %w", err)
	}
	return strings.Fields(string(names)), nil
}

// Delegate makes a user the owner of a cgroup v2 directory and of the files for its children. The
// files with the cgroup's limits keep their owner.
func Delegate(dir string, uid int) error {
	names, err := delegated()
	if err != nil {
		return err
	}
	for _, name := range append([]string{"."}, names...) {
		failpoint.Reach("cgroup.delegate")
		err := os.Chown(filepath.Join(dir, name), uid, -1)
		failpoint.Reach("cgroup.delegated")
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a file of a controller that is not enabled
			return fmt.Errorf("delegate cgroup: %w", err)
		}
	}
	return nil
}

// Undelegated returns the names of the other writable files of the group, on cgroup v2.
func (g *Group) Undelegated() (names []string, err error) {
	except, err := delegated()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(g.mgr.Path(""))
	if err != nil {
		return nil, fmt.Errorf("list files of cgroup %s: %w", g.path, err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return nil, fmt.Errorf("list files of cgroup %s: %w", g.path, err)
		}
		if info.Mode().IsRegular() && info.Mode()&0o222 != 0 && !slices.Contains(except, e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
