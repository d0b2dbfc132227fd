//go:build isal && cgo

package early

import "C" // early.c

// Done tells that the process was confined when it started.
const Done = true
