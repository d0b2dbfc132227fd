package server

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"net"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
)

// gRPC does not tell when a message has reached the socket. So each event ends with a field that
// clients ignore, its mark: a random key of the stream and the event's number. The connection looks
// for the marks in what it writes. The key is random, because events contain texts of pods.

// markField is the number of the mark's field. CRI is not expected to use it.
const markField = 500_000

const (
	keySize  = 16
	markSize = keySize + 8
)

// newMark returns the mark of a stream without the event's number.
func newMark() []byte {
	mark := protowire.AppendTag(nil, markField, protowire.BytesType)
	mark = protowire.AppendVarint(mark, markSize)
	key := make([]byte, keySize)
	rand.Read(key) // never fails, see crypto/rand
	return append(mark, key...)
}

// marked returns the mark of an event.
func (c *eventCursor) marked(number uint64) []byte {
	return binary.LittleEndian.AppendUint64(bytes.Clone(c.mark), number)
}

// markedConn is a connection that sets the positions of its streams of events.
type markedConn struct {
	net.Conn

	mu sync.Mutex // guards the fields below; held while positions are written to a tmpfs
	// +checklocks:mu
	watched []*eventCursor
	// +checklocks:mu
	tail []byte // the last bytes written, which may be the beginning of a mark
}

func (c *markedConn) watch(cursor *eventCursor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watched = append(c.watched, cursor)
}

func (c *markedConn) unwatch(cursor *eventCursor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, watched := range c.watched {
		if watched == cursor {
			c.watched = append(c.watched[:i:i], c.watched[i+1:]...)
			return
		}
	}
}

// Write implements net.Conn.
func (c *markedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written(b[:n])
	return n, err
}

// written finds the last mark of each stream. A mark that a frame's header divides is not found.
// The next one then counts for both.
func (c *markedConn) written(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.watched) == 0 {
		return
	}
	border := append(c.tail, b[:min(len(b), markSize)]...)
	for _, cursor := range c.watched {
		key := cursor.mark[len(cursor.mark)-keySize:]
		for _, part := range [][]byte{border, b} {
			if number, ok := lastMark(part, key); ok {
				cursor.Set(number)
			}
		}
	}
	if len(b) < markSize {
		c.tail = border[max(0, len(border)-markSize+1):]
	} else {
		c.tail = append(border[:0], b[len(b)-markSize+1:]...)
	}
}

// lastMark returns the number in the last complete mark with that key.
func lastMark(b, key []byte) (number uint64, ok bool) {
	at := bytes.LastIndex(b[:max(0, len(b)-8)], key)
	if at < 0 {
		return 0, false
	}
	return binary.LittleEndian.Uint64(b[at+keySize:]), true
}
