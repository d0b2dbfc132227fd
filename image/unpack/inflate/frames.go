package inflate

import (
	"bufio"

	"github.com/klauspost/compress/zstd"

	"berth/image/unpack/inflate/padding"
)

// frames passes on a zstd blob and reports where each of its frames starts. One Read never returns
// the end of a frame together with the start of the next frame. The decoder works without
// concurrency, so it asks for the next frame only when it has returned all bytes of the previous
// frame.
//
// It does not judge the blob. What it cannot parse is left to the decoder.
type frames struct {
	from    *bufio.Reader
	started func(in int64)
	n       int64 // bytes passed on
	left    int64 // bytes until the next header
	blocks  bool  // the next header belongs to a block
	sum     int64 // bytes of the frame's checksum
	lost    bool  // not parsed
}

const blockHeader = 3

func (f *frames) Read(p []byte) (int, error) {
	for f.left == 0 && !f.lost && len(p) > 0 {
		if err := f.header(); err != nil {
			return 0, err
		}
	}
	if !f.lost {
		p = p[:min(int64(len(p)), f.left)]
	}
	n, err := f.from.Read(p)
	f.n += int64(n)
	f.left -= int64(n)
	return n, err
}

// header parses the header of a frame or block, but does not consume it.
func (f *frames) header() error {
	if f.blocks {
		head, err := f.from.Peek(blockHeader)
		if err != nil {
			f.lost = true
			return nil
		}
		f.block(uint32(head[0]) | uint32(head[1])<<8 | uint32(head[2])<<16)
		return nil
	}
	if f.n > 0 {
		if err := padding.Skip(f.from); err != nil {
			return err
		}
	}
	head, err := f.from.Peek(zstd.HeaderMaxSize)
	if len(head) == 0 {
		return err
	}
	f.started(f.n)
	var h zstd.Header
	switch err := h.Decode(head); {
	case err != nil:
		f.lost = true
	case h.Skippable:
		f.left = skippableHeader + int64(h.SkippableSize)
	default:
		f.left, f.blocks, f.sum = int64(h.HeaderSize), true, 0
		if h.HasCheckSum {
			f.sum = checksumSize
		}
	}
	return nil
}

const (
	skippableHeader = 8
	checksumSize    = 4
)

// block handles the header of a block: RFC 8878, section 3.1.1.2.
func (f *frames) block(header uint32) {
	const last, typeShift, sizeShift, rle = 1, 1, 3, 1
	size := int64(header >> sizeShift)
	if header>>typeShift&3 == rle {
		size = 1
	}
	f.left = blockHeader + size
	if header&last != 0 {
		f.left += f.sum
		f.blocks = false
	}
}
