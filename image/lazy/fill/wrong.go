package fill

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// ErrWrongIndex is wrapped by the error of a layer whose index is shown to be wrong. Other errors
// can have causes on this node, or come from a source that sends wrong bytes.
var ErrWrongIndex = errors.New("the index of the blob is wrong")

// wrongIndex returns DataLoss that wraps ErrWrongIndex.
func wrongIndex(format string, args ...any) error {
	return errdefs.New(codes.DataLoss, "%w: %w", ErrWrongIndex, fmt.Errorf(format, args...))
}
