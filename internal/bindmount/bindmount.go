// Package bindmount knows the bind mounts among the mounts of a runtime-spec.
package bindmount

import "slices"

// Is tells whether a mount with that type and those options binds a path of the host. The
// type alone does not say so: the runtime-spec (config.md, Linux mount options) has bind and
// rbind as options, and what CDI vendors and NRI plugins add has often no type or "none".
func Is(kind string, options []string) bool {
	return kind == "bind" || slices.Contains(options, "bind") || slices.Contains(options, "rbind")
}
