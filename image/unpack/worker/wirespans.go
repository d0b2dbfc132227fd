package worker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"berth/image/blobindex"
	"berth/image/unpack"
	"berth/internal/frame"
)

// Messages about spans. The daemon sends a span, and berth-unpack answers with its tar or an error.
const (
	kindSpan = 'S' // length of the tar, point, bytes of the blob
	kindTar  = 'T' // bytes of the tar
)

// maxSpan limits the message about a span. blobindex.MaxIn limits the span's bytes of the blob, and
// the point takes the rest.
const maxSpan = blobindex.MaxIn + 64<<10

// maxError limits an error: its code and its text.
const maxError = binary.MaxVarintLen64 + maxText

// ErrMalformed is wrapped by errors about messages of a span that violate the protocol.
var ErrMalformed = errors.New("a malformed message")

// WriteSpan sends a span. in has its bytes of the blob, which decompress to out bytes.
func WriteSpan(w io.Writer, p *blobindex.Point, out int64, in []byte) error {
	head := blobindex.AppendPoint(binary.AppendUvarint(nil, uint64(out)), p)
	message := frame.AppendHeader(make([]byte, 0, frame.HeaderSize+len(head)), kindSpan, len(head)+len(in))
	if _, err := w.Write(append(message, head...)); err != nil {
		return err
	}
	_, err := w.Write(in)
	return err
}

// readSpan receives a span. in is valid until buf is used again. The error is io.EOF if no span
// follows.
func readSpan(r io.Reader, buf *bytes.Buffer) (p blobindex.Point, out int64, in []byte, err error) {
	kind, size, err := readHeader(r, maxSpan)
	if err != nil {
		return p, 0, nil, err
	}
	buf.Reset()
	if n, _ := io.CopyN(buf, r, int64(size)); n < int64(size) {
		return p, 0, nil, io.ErrUnexpectedEOF
	}
	rest := bytes.NewReader(buf.Bytes())
	n, err := binary.ReadUvarint(rest)
	if err != nil || kind != kindSpan || n > blobindex.MaxSpan {
		return p, 0, nil, fmt.Errorf("%w: kind %q, %d bytes", ErrMalformed, kind, n)
	}
	if p, err = blobindex.ReadPoint(rest); err != nil {
		return p, 0, nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return p, int64(n), buf.Bytes()[buf.Len()-rest.Len():], nil
}

// writeTar answers with the tar of a span.
func writeTar(w io.Writer, tar []byte) error {
	if _, err := w.Write(frame.AppendHeader(nil, kindTar, len(tar))); err != nil {
		return err
	}
	_, err := w.Write(tar)
	return err
}

// ReadTar receives the tar of a span, which has out bytes. It trusts nothing. The error is an
// *unpack.Error if the sender reports one, or wraps ErrMalformed.
func ReadTar(r io.Reader, out int64) ([]byte, error) {
	kind, size, err := readHeader(r, max(int(out), maxError))
	if err != nil {
		return nil, err
	}
	switch {
	case kind == kindTar && int64(size) == out:
		tar := make([]byte, out)
		_, err := io.ReadFull(r, tar)
		return tar, err
	case kind == kindError && size <= maxError:
		text := make([]byte, size)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, err
		}
		err := reported(text)
		if known := new(unpack.Error); !errors.As(err, &known) {
			err = fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		return nil, err
	}
	return nil, fmt.Errorf("%w: kind %q, %d bytes", ErrMalformed, kind, size)
}

// readHeader reads the header of a message of at most limit bytes.
func readHeader(r io.Reader, limit int) (kind byte, size int, err error) {
	var header [frame.HeaderSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, 0, err
	}
	length := binary.BigEndian.Uint32(header[1:])
	if int64(length) > int64(limit) {
		return 0, 0, fmt.Errorf("%w: %d bytes", ErrMalformed, length)
	}
	return header[0], int(length), nil
}
