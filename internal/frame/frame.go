// Package frame is the framing of two protocols: the monitor's socket (shim/proto) and the answer
// of berth-unpack (image/unpack/worker).
//
// # Contract
//
// A frame is a type byte, the length of the payload in four big-endian bytes, and the payload. The
// sender is not trusted. A payload beyond the receiver's limit is ErrTooLong, and decoding
// allocates no memory. After an error the rest of the stream is unusable.
package frame

import (
	"encoding/binary"
	"errors"
	"io"
)

// HeaderSize is the length of the type and the payload's length.
const HeaderSize = 5

// ErrTooLong is the error for a payload that exceeds the limit.
var ErrTooLong = errors.New("frame is too long")

// AppendHeader appends the header of a frame whose payload of size bytes follows.
func AppendHeader(dst []byte, kind byte, size int) []byte {
	return binary.BigEndian.AppendUint32(append(dst, kind), uint32(size))
}

// Next decodes the first frame of buf and returns its length in bytes, 0 if it is incomplete. The
// payload shares the memory of buf.
func Next(buf []byte, limit int) (kind byte, payload []byte, size int, err error) {
	if len(buf) < HeaderSize {
		return 0, nil, 0, nil
	}
	length := binary.BigEndian.Uint32(buf[1:HeaderSize])
	if int64(length) > int64(limit) {
		return 0, nil, 0, ErrTooLong
	}
	if size = HeaderSize + int(length); len(buf) < size {
		return 0, nil, 0, nil
	}
	return buf[0], buf[HeaderSize:size], size, nil
}

// Read reads one frame. Its payload is in buf, whose length is the limit. It returns the errors of
// io.ReadFull.
func Read(r io.Reader, buf []byte) (kind byte, payload []byte, err error) {
	var header [HeaderSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	length := binary.BigEndian.Uint32(header[1:])
	if int64(length) > int64(len(buf)) {
		return 0, nil, ErrTooLong
	}
	payload = buf[:length]
	_, err = io.ReadFull(r, payload)
	return header[0], payload, err
}
