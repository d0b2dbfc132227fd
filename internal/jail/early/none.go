//go:build !isal || !cgo

package early

// Done reports that the process was confined at its start.
const Done = false
