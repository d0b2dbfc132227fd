package journal

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"berth/internal/pidfd"
)

// Process is a client. The start time distinguishes it from other processes with its ID.
type Process struct {
	PID       int
	StartTime uint64
}

// ProcessOf returns the running process with that ID.
func ProcessOf(pid int) (Process, error) {
	start, err := pidfd.StartTime(pid)
	if err != nil {
		return Process{}, fmt.Errorf("find client %d: %w", pid, err)
	}
	return Process{pid, start}, nil
}

// Cursors are the positions of clients, with one file for each stream: PID-STARTTIME-NUMBER.
type Cursors struct {
	dir string
	log *slog.Logger

	mu sync.Mutex // guards the fields below, not the files
	// +checklocks:mu
	left map[Process][]*Cursor // of the previous daemon, whose clients have not come back; the oldest position first
	// +checklocks:mu
	highest int // number in the names of files
}

// Cursor is the position of one stream: the last event that its client has got. Its methods may be
// called from any number of goroutines.
type Cursor struct {
	path string
	log  *slog.Logger

	mu sync.Mutex // guards the fields below; held while eight bytes are written to a tmpfs
	// +checklocks:mu
	file *os.File // nil: closed or without a file
	// +checklocks:mu
	position uint64
}

// OpenCursors reads the positions in a directory, which it makes, and drops those of processes that
// have ended. Files that it cannot read are removed. It also returns the highest position.
func OpenCursors(dir string, log *slog.Logger) (c *Cursors, highest uint64) {
	c = &Cursors{dir: dir, log: log, left: map[Process][]*Cursor{}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		log.Warn("make the directory of clients of events", "error", err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		log.Warn("read the clients of events", "error", err)
	}
	left, numbers := map[Process][]*Cursor{}, 0
	for _, entry := range files {
		found, process, number, err := openCursor(filepath.Join(dir, entry.Name()), log)
		if err != nil {
			found.Remove()
			continue
		}
		highest, numbers = max(highest, found.Position()), max(numbers, number)
		left[process] = append(left[process], found)
	}
	for _, cursors := range left {
		slices.SortFunc(cursors, func(a, b *Cursor) int { return cmp.Compare(a.Position(), b.Position()) })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left, c.highest = left, numbers
	return c, highest
}

// openCursor opens the cursor of a running process.
func openCursor(path string, log *slog.Logger) (c *Cursor, p Process, number int, err error) {
	c = &Cursor{path: path, log: log}
	if _, err := fmt.Sscanf(filepath.Base(path), "%d-%d-%d", &p.PID, &p.StartTime, &number); err != nil {
		return c, p, 0, fmt.Errorf("%s is no file of a client: %w", path, err)
	}
	if now, err := ProcessOf(p.PID); err != nil || now != p {
		return c, p, 0, fmt.Errorf("process %d has ended: %w", p.PID, errors.Join(err, os.ErrProcessDone))
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return c, p, number, err
	}
	var content [8]byte
	_, err = file.ReadAt(content[:], 0)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.file, c.position = file, binary.LittleEndian.Uint64(content[:])
	return c, p, number, err
}

// Take returns the cursor of a stream that the process has opened. It is the one of a stream which
// ended with the previous daemon, or else a new one at position last.
func (c *Cursors) Take(p Process, last uint64) *Cursor {
	c.mu.Lock()
	c.highest++
	number := c.highest
	var found *Cursor
	if left := c.left[p]; len(left) > 0 {
		found, c.left[p] = left[0], left[1:]
	}
	c.mu.Unlock()
	if found != nil {
		return found
	}
	name := fmt.Sprintf("%d-%d-%d", p.PID, p.StartTime, number)
	made := &Cursor{path: filepath.Join(c.dir, name), log: c.log}
	made.create(last)
	return made
}

// create makes the file. Without it the client starts anew at the next daemon.
func (c *Cursor) create(position uint64) {
	file, err := os.OpenFile(c.path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		c.log.Warn("record a client of events, which misses events if the daemon restarts", "error", err)
	}
	c.mu.Lock()
	c.file = file
	c.mu.Unlock()
	c.Set(position)
}

// Position returns the number of the last event that the client has got.
func (c *Cursor) Position() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.position
}

// Set records that the client has got the event with that number. An older number has no effect.
func (c *Cursor) Set(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if number < c.position {
		return
	}
	c.position = number
	if c.file == nil {
		return
	}
	if _, err := c.file.WriteAt(binary.LittleEndian.AppendUint64(nil, number), 0); err != nil {
		c.log.Warn("record the position of a client of events", "error", err)
	}
}

// Remove forgets the client.
func (c *Cursor) Remove() {
	c.Close()
	if err := remove(c.path); err != nil {
		c.log.Warn("forget a client of events", "error", err)
	}
}

// Close ends the use of the cursor. The next daemon finds its file.
func (c *Cursor) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file != nil {
		_ = c.file.Close() // nothing is buffered
	}
	c.file = nil
}
