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
	// Of the previous daemon, whose clients have not come back; the oldest position first.
	left map[Process][]place
	// +checklocks:mu
	highest int // number in the names of files
}

// place is the file and position of a stream that has ended.
type place struct {
	path     string
	position uint64
}

// positionSize is the size of a file in bytes.
const positionSize = 8

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
// have ended. Files that it cannot read are removed. It also returns the highest position. The
// client of an incomplete file gets ErrBehind.
func OpenCursors(dir string, log *slog.Logger) (c *Cursors, highest uint64) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		log.Warn("make the directory of clients of events", "error", err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		log.Warn("read the clients of events", "error", err)
	}
	left, numbers := map[Process][]place{}, 0
	for _, file := range files {
		path := filepath.Join(dir, file.Name())
		process, number, position, err := readCursor(path)
		if err != nil {
			(&Cursor{path: path, log: log}).Remove()
			continue
		}
		highest, numbers = max(highest, position), max(numbers, number)
		left[process] = append(left[process], place{path, position})
	}
	for _, places := range left {
		slices.SortFunc(places, func(a, b place) int { return cmp.Compare(a.position, b.position) })
	}
	return &Cursors{dir: dir, log: log, left: left, highest: numbers}, highest
}

// readCursor reads the position of a running process. number is the last part of the file's name.
// The position in an incomplete file, of a full filesystem for example, is 0. No journal has the
// event after it.
func readCursor(path string) (p Process, number int, position uint64, err error) {
	if _, err := fmt.Sscanf(filepath.Base(path), "%d-%d-%d", &p.PID, &p.StartTime, &number); err != nil {
		return p, 0, 0, fmt.Errorf("%s is no file of a client: %w", path, err)
	}
	if now, err := ProcessOf(p.PID); err != nil || now != p {
		return p, 0, 0, errors.Join(err, os.ErrProcessDone)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return p, 0, 0, err
	}
	if len(content) == positionSize {
		position = binary.LittleEndian.Uint64(content)
	}
	return p, number, position, nil
}

// Take returns the cursor of a stream that the process has opened. It continues a stream that ended
// with the previous daemon, or else begins at position last. Without a file the client begins anew
// at the next daemon.
func (c *Cursors) Take(p Process, last uint64) *Cursor {
	c.mu.Lock()
	c.highest++
	cursor := &Cursor{path: filepath.Join(c.dir, fmt.Sprintf("%d-%d-%d", p.PID, p.StartTime, c.highest)), log: c.log}
	if left := c.left[p]; len(left) > 0 {
		cursor.path, last, c.left[p] = left[0].path, left[0].position, left[1:]
	}
	c.mu.Unlock()
	file, err := os.OpenFile(cursor.path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		c.log.Warn("record a client of events, which misses events if the daemon restarts", "error", err)
	}
	cursor.mu.Lock()
	cursor.file = file
	cursor.mu.Unlock()
	cursor.Set(last)
	return cursor
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
