package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
)

// clearVolatile removes the marker that a volatile mount leaves in the work directory. The marker
// makes overlayfs refuse later mounts, because the upper layer may lack data after a crash of the
// machine. berth mounts an upper layer only in the boot that created it, so no data is
// lost. A second mount is a retry of a failed launch.
func (s Spec) clearVolatile() error {
	if s.Work == "" {
		return nil
	}
	mark := filepath.Join(s.Work, "work", "incompat", "volatile")
	if err := os.RemoveAll(mark); err != nil {
		return fmt.Errorf("remove overlay's marker of a volatile mount: %w", err)
	}
	return nil
}
