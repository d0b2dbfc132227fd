package testutil

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// WantError checks the code of an error and that its text contains the given parts.
func WantError(t *testing.T, err error, code codes.Code, parts ...string) {
	t.Helper()
	if errdefs.Code(err) != code {
		t.Errorf("code %v, want %v (error: %v)", errdefs.Code(err), code, err)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not contain %q", err, part)
		}
	}
}
