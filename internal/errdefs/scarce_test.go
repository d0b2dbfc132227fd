package errdefs

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

func TestScarceGivesCodeOfExhaustedResource(t *testing.T) {
	t.Parallel()
	full := &fs.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}
	for name, tt := range map[string]struct {
		err  error
		want codes.Code
	}{
		"full":                 {fmt.Errorf("make: %w", full), codes.ResourceExhausted},
		"full within Internal": {fmt.Errorf("run: %w", Internal("start: %w", full)), codes.ResourceExhausted},
		"read-only":            {&fs.PathError{Op: "open", Path: "/x", Err: unix.EROFS}, codes.FailedPrecondition},
		"descriptors":          {errors.Join(errors.New("other"), unix.EMFILE), codes.ResourceExhausted},
		"fork":                 {&fs.PathError{Op: "fork/exec", Path: "/x", Err: unix.EAGAIN}, codes.ResourceExhausted},
		"another EAGAIN":       {&fs.PathError{Op: "read", Path: "/x", Err: unix.EAGAIN}, codes.Unknown},
		"a better code":        {Unavailable("%w", full), codes.Unavailable},
		"something else":       {Internal("%w", unix.EIO), codes.Internal},
		"nothing":              {nil, codes.OK},
	} {
		if got := Code(Scarce(tt.err)); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	if err := Scarce(full); !errors.Is(err, unix.ENOSPC) || err.Error() != full.Error() {
		t.Errorf("the error became %v", err)
	}
}

func TestReportedTextOfExhaustedResourceHasItsCode(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]codes.Code{
		"open /x: no space left on device":             codes.ResourceExhausted,
		"open log /x: read-only file system":           codes.FailedPrecondition,
		`exec: "no space left on device": not found`:   codes.Internal,
		"no space left on device is what it was about": codes.Internal,
	} {
		if got := Code(Reported(codes.Internal, text)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	if got := Code(Reported(codes.InvalidArgument, "mkdir /x: read-only file system")); got != codes.InvalidArgument {
		t.Errorf("the code became %s", got)
	}
}
