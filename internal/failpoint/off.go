//go:build !failpoints

package failpoint

// Enabled tells whether this binary has failpoints.
const Enabled = false

// Reach does nothing.
func Reach(string) {}

// Env is empty.
func Env() []string { return nil }
