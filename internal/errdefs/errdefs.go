// Package errdefs attaches a gRPC code to an error where the error arises, so that the server need
// not guess the code.
//
// The code survives any number of fmt.Errorf("…: %w") wrappers, because
// google.golang.org/grpc/status finds it through the method GRPCStatus. The client receives the
// text of the outermost wrapper.
package errdefs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/internal/coded"
)

type withStatus struct {
	code codes.Code
	err  error
}

func (e *withStatus) Error() string              { return e.err.Error() }
func (e *withStatus) Unwrap() error              { return e.err }
func (e *withStatus) GRPCStatus() *status.Status { return status.New(e.code, e.err.Error()) }

// New returns an error with the given gRPC code. The format may use %w.
func New(code codes.Code, format string, args ...any) error {
	return &withStatus{code: code, err: fmt.Errorf(format, args...)}
}

// NotFound, InvalidArgument, AlreadyExists, FailedPrecondition, Unavailable, Unimplemented and
// Internal call New with the code of the same name.

func NotFound(format string, args ...any) error { return New(codes.NotFound, format, args...) }

func InvalidArgument(format string, args ...any) error {
	return New(codes.InvalidArgument, format, args...)
}

func AlreadyExists(format string, args ...any) error {
	return New(codes.AlreadyExists, format, args...)
}

func FailedPrecondition(format string, args ...any) error {
	return New(codes.FailedPrecondition, format, args...)
}

func Unavailable(format string, args ...any) error { return New(codes.Unavailable, format, args...) }

func Internal(format string, args ...any) error { return New(codes.Internal, format, args...) }

// Code returns the gRPC code of err. For nil it is OK. Otherwise it is the code of the outermost
// wrapped error with a code, then that of package coded, then Canceled or DeadlineExceeded for
// context errors, then Unknown.
func Code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	var c interface{ GRPCStatus() *status.Status }
	if errors.As(err, &c) {
		return c.GRPCStatus().Code()
	}
	if code, ok := coded.Of(err); ok {
		return codes.Code(code)
	}
	switch {
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	}
	return codes.Unknown
}

// IsNotFound reports whether err carries codes.NotFound.
func IsNotFound(err error) bool { return Code(err) == codes.NotFound }

// DeadlineExceeded calls New with codes.DeadlineExceeded.
func DeadlineExceeded(format string, args ...any) error {
	return New(codes.DeadlineExceeded, format, args...)
}

// IsBadPath reports whether a system call failed because of its path. The path may not exist, may
// lead through a file or a link loop, or may be too long. Then the caller passed a wrong path.
func IsBadPath(err error) bool {
	for _, e := range []error{fs.ErrNotExist, unix.ENOTDIR, unix.ELOOP, unix.ENAMETOOLONG} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
