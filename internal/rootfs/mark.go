package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
)

// clearVolatile removes the marker that a volatile mount leaves in the work
// directory, and that makes overlayfs refuse every later mount: after a crash
// of the machine the upper layer may lack data. berth mounts an upper layer only
// in the boot it was made in, where the page cache is the truth; a second mount is
// a launch that is tried again after the first one failed.
func (s Spec) clearVolatile() error {
	if s.Work == "" {
		return nil
	}
	mark := filepath.Join(s.Work, "work", "incompat", "volatile")
	if err := os.RemoveAll(mark); err != nil {
		return fmt.Errorf("remove overlay's mark of a volatile mount: %w", err)
	}
	return nil
}
