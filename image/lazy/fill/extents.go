package fill

import (
	"bytes"
	"fmt"
	"io"
	"sort"

	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
)

// extent is the content of one file: size bytes of the tar, and their place in the data file.
type extent struct{ tar, data, size int64 }

// extents are the contents of a layer, in the order of the tar. The data file has the same order,
// because unpacking appends each content to it.
type extents []extent

// noContent stands for the content of a layer when only its record is read.
type noContent struct{}

// ReadContent implements tarsplit.Content.
func (noContent) ReadContent(tarsplit.Ref, []byte, int64) error { return io.ErrUnexpectedEOF }

// extentsOf reads the extents from the record of an index. berth-unpack wrote the record and may
// have been compromised, so an order or range that unpacking cannot produce is a DataLoss error.
func extentsOf(x *blobindex.Index) (list extents, err error) {
	if x.OfChunks() {
		return extentsOfChunks(x.Chunks), nil
	}
	r, err := tarsplit.Open(bytes.NewReader(x.Record), int64(len(x.Record)), x.TarSize, noContent{})
	if err != nil {
		return nil, errdefs.New(codes.DataLoss, "%w", err)
	}
	next := int64(0) // end of the extent before, in the data file
	err = r.Contents(func(offset, size int64, at tarsplit.Ref) error {
		if at.Name != "" || at.Offset < next || size > x.DataSize-at.Offset {
			return fmt.Errorf("content of %d bytes at %q, %d of %d bytes of data", size, at.Name, at.Offset, x.DataSize)
		}
		next = at.Offset + size
		list = append(list, extent{offset, at.Offset, size})
		return nil
	})
	if err != nil {
		return nil, errdefs.New(codes.DataLoss, "record of the tar: %w", err)
	}
	return list, nil
}

// extentsOfChunks returns the extents of chunks, whose places are consistent. Chunks that follow
// each other in both files become one extent. So an extent ends where a file or a block ends.
func extentsOfChunks(chunks []blobindex.Chunk) (list extents) {
	for i := range chunks {
		c := &chunks[i]
		if n := len(list); n > 0 && list[n-1].tar+list[n-1].size == c.Out && list[n-1].data+list[n-1].size == c.Data {
			list[n-1].size += c.Size
			continue
		}
		list = append(list, extent{c.Out, c.Data, c.Size})
	}
	return list
}

// inData calls do for each part of the tar whose content is in the given range of the data file.
func (e extents) inData(offset, count int64, do func(tar, size int64)) {
	first := sort.Search(len(e), func(i int) bool { return e[i].data+e[i].size > offset })
	for _, x := range e[first:] {
		from := max(offset, x.data)
		to := min(offset+count, x.data+x.size)
		if from >= to {
			return
		}
		do(x.tar+from-x.data, to-from)
	}
}

// inTar calls do for each part of file content in a range of the tar, with its place in the data
// file, until do fails.
func (e extents) inTar(offset, count int64, do func(tar, data, size int64) error) error {
	first := sort.Search(len(e), func(i int) bool { return e[i].tar+e[i].size > offset })
	for _, x := range e[first:] {
		from := max(offset, x.tar)
		to := min(offset+count, x.tar+x.size)
		if from >= to {
			return nil
		}
		if err := do(from, x.data+from-x.tar, to-from); err != nil {
			return err
		}
	}
	return nil
}

// endsAt reports whether the content of a file ends at an offset in the data file.
func (e extents) endsAt(offset int64) bool {
	i := sort.Search(len(e), func(i int) bool { return e[i].data+e[i].size >= offset })
	return i < len(e) && e[i].size > 0 && e[i].data+e[i].size == offset
}

// fileEnd returns the end, in the tar, of the file to which a byte of the data file belongs, or -1.
func (e extents) fileEnd(offset int64) int64 {
	i := sort.Search(len(e), func(i int) bool { return e[i].data+e[i].size > offset })
	if i == len(e) || e[i].data > offset {
		return -1
	}
	return e[i].tar + e[i].size
}
