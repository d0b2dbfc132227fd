// Package testutil supports tests with checks, files, a mount namespace, and skips with a reason.
// contrib/test lists the skipped tests in its summary. Only test code imports this package.
package testutil

import (
	"bytes"
	"sync"
)

// Buffer is a bytes.Buffer for concurrent use: tests read it while others write. The zero value is
// ready for use.
type Buffer struct {
	mu sync.Mutex
	// +checklocks:mu
	content bytes.Buffer
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.Write(p)
}

// String returns the unread content.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.String()
}

// Take returns the content written since its last call.
func (b *Buffer) Take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.content.Reset()
	return b.content.String()
}
