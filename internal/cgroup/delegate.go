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
	failpoint.Reach("cgroup.delegate")
	err = os.Chown(dir, uid, -1)
	for name := range strings.FieldsSeq(string(names)) {
		// A file of a controller that is not enabled does not exist.
		if e := os.Chown(filepath.Join(dir, name), uid, -1); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	failpoint.Reach("cgroup.delegated")
	if err != nil {
		return fmt.Errorf("delegate cgroup: %w", err)
	}
	return nil
}
