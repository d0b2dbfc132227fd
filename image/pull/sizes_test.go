package pull

import (
	"math"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry"
	"berth/image/unpack"
	"berth/internal/errdefs"
)

func TestCheckSizes(t *testing.T) {
	for size, want := range map[int64]codes.Code{
		1<<40 + 1<<34 + 1<<20: codes.OK, 1<<40 + 1<<34 + 1<<20 + 1: codes.FailedPrecondition,
		math.MaxInt64: codes.FailedPrecondition,
	} {
		err := checkSizes([]registry.Layer{{Blob: ocispec.Descriptor{Size: size}}}, unpack.Limits{Tar: 1 << 40})
		if got := errdefs.Code(err); got != want {
			t.Errorf("%d bytes: %v, want %v: %v", size, got, want, err)
		}
	}
}
