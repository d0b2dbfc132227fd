//go:build !failpoints

package failpoint

// Enabled reports whether this binary has failpoints.
const Enabled = false

// Reach does nothing.
func Reach(string) {}

// Env returns nil.
func Env() []string { return nil }
