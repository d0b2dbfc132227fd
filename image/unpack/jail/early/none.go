//go:build !isal || !cgo

package early

// Done tells that the process was confined when it started.
const Done = false
