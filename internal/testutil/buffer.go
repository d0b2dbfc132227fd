// Package testbuffer has a buffer that tests read while others write: logs, output of commands, screens.
package testutil

import (
	"bytes"
	"sync"
)

// Buffer is a bytes.Buffer that several goroutines may use. Its zero value is ready. The lock guards the content.
type Buffer struct {
	mu      sync.Mutex
	content bytes.Buffer
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.Write(p)
}

// String returns what was written and not taken.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.content.String()
}

// Take returns what was written since it was called last.
func (b *Buffer) Take() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.content.Reset()
	return b.content.String()
}
