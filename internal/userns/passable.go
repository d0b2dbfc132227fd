package userns

import (
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// CheckPassable tells whether every user can get to path, and so the root of any user
// namespace. It asks for the permissions of others and knows no ACLs.
func CheckPassable(path string) error {
	for dir := filepath.Clean(path); ; dir = filepath.Dir(dir) {
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			return fmt.Errorf("look at %s: %w", dir, err)
		}
		if st.Mode&0o001 == 0 {
			return fmt.Errorf("users other than root can't pass through %s (mode %04o): %s must be reachable for all", dir, st.Mode&0o7777, path)
		}
		if dir == "/" || !strings.HasPrefix(dir, "/") {
			return nil
		}
	}
}
