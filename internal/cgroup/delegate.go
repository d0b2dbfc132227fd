package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"berth/internal/failpoint"
)

// delegated names the files that the owner of a delegated cgroup may write (cgroups(7)).
const delegated = "/sys/kernel/cgroup/delegate"

// Delegate makes a user the owner of a cgroup v2 directory and of the files for its children. The
// files with the cgroup's limits keep their owner.
func Delegate(dir string, uid int) error {
	names, err := os.ReadFile(delegated)
	if err != nil {
		return fmt.Errorf("delegate cgroup: %w", err)
	}
	for _, name := range append([]string{"."}, strings.Fields(string(names))...) {
		failpoint.Reach("cgroup.delegate")
		err := os.Chown(filepath.Join(dir, name), uid, -1)
		failpoint.Reach("cgroup.delegated")
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a file of a controller that is not enabled
			return fmt.Errorf("delegate cgroup: %w", err)
		}
	}
	return nil
}
