package launcher

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/ociruntime"
)

// writeBundle makes Dir the bundle that hooks are told of: many read the spec in it, for
// the place of the root filesystem. It may hold secrets in the environment and goes with Dir.
func (c *libraryMaker) writeBundle() error {
	data, err := json.Marshal(c.Spec)
	if err != nil {
		return fmt.Errorf("encode the spec for its hooks: %w", err)
	}
	path := filepath.Join(c.Dir, ociruntime.ConfigFile)
	c.undo.Add("remove "+path, func() error { return ignore(unix.Unlink(path), unix.ENOENT) })
	failpoint.Reach("launcher.write-spec")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("write the spec for its hooks: %w", err)
	}
	failpoint.Reach("launcher.spec-written")
	// libcontainer takes the working directory for the bundle.
	c.config.Labels = slices.DeleteFunc(c.config.Labels, func(l string) bool { return strings.HasPrefix(l, "bundle=") })
	c.config.Labels = append(c.config.Labels, "bundle="+c.Dir)
	return nil
}
