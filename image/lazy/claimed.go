package lazy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"google.golang.org/grpc/codes"

	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
)

// ErrWrongIndex is wrapped by the error of a layer whose index is shown to be wrong. Other errors
// can have causes on this node, or come from a source that sends other bytes than the blob's.
var ErrWrongIndex = errors.New("the index of the blob is wrong")

// wrongIndex returns DataLoss that wraps ErrWrongIndex.
func wrongIndex(format string, args ...any) error {
	return errdefs.New(codes.DataLoss, "%w: %w", ErrWrongIndex, fmt.Errorf(format, args...))
}

// claimedTar is the tar that the record of a layer with a Prove function restores. Each span of the
// blob is compared with it. So the points of an index are true after the proof, also those that no
// content of a file depends on.
type claimedTar struct{ tar *tarsplit.Reader }

// openClaimed opens the tar of a layer.
func openClaimed(ctx context.Context, record, data *os.File, tarSize int64) (*claimedTar, error) {
	st, err := record.Stat()
	if err != nil {
		return nil, err
	}
	tar, err := tarsplit.Open(record, st.Size(), tarSize, content{ctx, data})
	if err != nil {
		return nil, errdefs.New(codes.DataLoss, "%w", err)
	}
	return &claimedTar{tar}, nil
}

// comparedBytes is how much of a tar is compared at a time.
const comparedBytes = 64 << 10

// compare compares decompressed bytes with the tar at an offset. The contents of files in the range
// are in the data file. The error is DataLoss if the bytes differ. A nil claimedTar has every tar.
func (c *claimedTar) compare(got []byte, offset int64) error {
	if c == nil {
		return nil
	}
	buf := make([]byte, min(len(got), comparedBytes))
	for len(got) > 0 {
		want := buf[:min(len(got), len(buf))]
		_, err := c.tar.ReadAt(want, offset)
		if errors.Is(err, tarsplit.ErrDamaged) {
			return errdefs.New(codes.DataLoss, "%w", err)
		}
		if err != nil {
			return fmt.Errorf("restore the tar at %d: %w", offset, err)
		}
		if !bytes.Equal(got[:len(want)], want) {
			return wrongIndex("the decompressed bytes are not those of the record at %d", offset)
		}
		got, offset = got[len(want):], offset+int64(len(want))
	}
	return nil
}
