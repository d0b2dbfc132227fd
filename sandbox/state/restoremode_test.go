package state

import (
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

func TestRestoreModePermits(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode   RestoreMode
		mapped bool
		want   codes.Code
	}{
		{RestoreOff, false, codes.FailedPrecondition},
		{RestoreOff, true, codes.FailedPrecondition},
		{RestoreUserns, false, codes.FailedPrecondition},
		{RestoreUserns, true, codes.OK},
		{RestoreTrusted, false, codes.OK},
		{RestoreTrusted, true, codes.OK},
		{"", true, codes.FailedPrecondition},
	} {
		if err := test.mode.Permit(test.mapped); errdefs.Code(err) != test.want {
			t.Errorf("%s, user namespace %t: %v, want %v", test.mode, test.mapped, err, test.want)
		}
	}
}
