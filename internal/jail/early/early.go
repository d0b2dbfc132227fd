//go:build isal && cgo

package early

import "C" // early.c

// Done reports that the process was confined at its start.
const Done = true
