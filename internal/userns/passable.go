package userns

import (
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// CheckPassable returns an error unless all users can reach path, including the root of any user
// namespace. It checks the mode bits for others and ignores ACLs.
func CheckPassable(path string) error {
	for dir := filepath.Clean(path); ; dir = filepath.Dir(dir) {
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			return fmt.Errorf("stat %s: %w", dir, err)
		}
		if st.Mode&0o001 == 0 {
			return fmt.Errorf(
				"%s (mode %04o) must be searchable by all users, because %s must be reachable in user namespaces",
				dir, st.Mode&0o7777, path)
		}
		if dir == "/" || !strings.HasPrefix(dir, "/") {
			return nil
		}
	}
}
