package server

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"net"
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
)

// gRPC does not tell when a message has reached the socket. So each event ends with a field that
// clients ignore, its mark: a random key of the stream and the event's number. The connection looks
// for the marks in what it writes. The key is random, because events contain texts of pods.

// markField is the number of the mark's field. CRI is not expected to use it.
const markField = 500_000

// markKey identifies a stream.
type markKey [16]byte

const valueSize = len(markKey{}) + 8

var (
	markStart = protowire.AppendVarint(protowire.AppendTag(nil, markField, protowire.BytesType), uint64(valueSize))
	markSize  = len(markStart) + valueSize
)

func newKey() (key markKey) {
	rand.Read(key[:]) // never fails, see crypto/rand
	return key
}

// marked returns the mark of an event.
func (c *eventCursor) marked(number uint64) []byte {
	return binary.LittleEndian.AppendUint64(slices.Concat(markStart, c.key[:]), number)
}

// markedConn is a connection that sets the positions of its streams of events.
type markedConn struct {
	net.Conn

	mu sync.Mutex // guards the fields below; held while positions are written to a tmpfs
	// +checklocks:mu
	watched map[markKey]*eventCursor
	// +checklocks:mu
	tail []byte // the last bytes written, which may be the beginning of a mark
}

func (c *markedConn) watch(cursor *eventCursor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watched == nil {
		c.watched = map[markKey]*eventCursor{}
	}
	c.watched[cursor.key] = cursor
}

func (c *markedConn) unwatch(cursor *eventCursor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watched, cursor.key)
}

// Write implements net.Conn.
func (c *markedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written(b[:n])
	return n, err
}

// written finds the marks. A mark that a frame's header divides is not found. The next one then
// counts for both.
func (c *markedConn) written(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.watched) == 0 {
		return
	}
	border := append(c.tail, b[:min(len(b), markSize)]...)
	c.setPositions(border)
	c.setPositions(b)
	if len(b) < markSize {
		c.tail = border[max(0, len(border)-markSize+1):]
	} else {
		c.tail = append(border[:0], b[len(b)-markSize+1:]...)
	}
}

// setPositions sets the positions of the complete marks in b. It searches once for all streams,
// because a connection may have a thousand.
//
// +checklocks:c.mu
func (c *markedConn) setPositions(b []byte) {
	for {
		at := bytes.Index(b, markStart)
		if at < 0 || len(b)-at < markSize {
			return
		}
		b = b[at+len(markStart):]
		if cursor := c.watched[markKey(b[:len(markKey{})])]; cursor != nil {
			cursor.Set(binary.LittleEndian.Uint64(b[len(markKey{}):]))
		}
	}
}
