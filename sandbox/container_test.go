package sandbox

import (
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

// kubelet matches the beginning of some errors. Their codes must not change.
func TestCreateErrorKeepsPrefixForKubelet(t *testing.T) {
	volume := fmt.Errorf("%w: mount of /v: %w", crierrors.ErrImageVolumeMountFailed, errdefs.NotFound("image %q: not found", "x"))
	for _, test := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{volume, codes.NotFound, `ImageVolumeMountFailed: mount of /v: image "x": not found (create c)`},
		{errdefs.FailedPrecondition("%w: mount of /v: too old", crierrors.ErrRROUnsupported), codes.FailedPrecondition,
			"RROUnsupported: mount of /v: too old (create c)"},
		{errdefs.InvalidArgument("no"), codes.InvalidArgument, "create c: no"},
		{errors.New("no"), codes.Unknown, "create c: no"},
	} {
		got := createFailed("c", test.err)
		if got.Error() != test.text || errdefs.Code(got) != test.code {
			t.Errorf("got %v %q, want %v %q", errdefs.Code(got), got, test.code, test.text)
		}
	}
}
