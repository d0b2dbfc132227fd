package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// Error is an error with a gRPC code. It is not package errdefs', which would bring
// protobuf into berth-unpack.
type Error struct {
	Code codes.Code
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// refuse is for a tar that is no layer.
func refuse(format string, args ...any) error {
	return &Error{codes.InvalidArgument, fmt.Errorf(format, args...)}
}

// exceeds is for a layer that is beyond its limits.
func exceeds(format string, args ...any) error {
	return &Error{codes.ResourceExhausted, fmt.Errorf(format, args...)}
}

// corrupt is for a blob that cannot be decompressed.
func corrupt(format string, args ...any) error {
	return &Error{codes.DataLoss, fmt.Errorf(format, args...)}
}

// Code returns the code of err: that of an *Error in it, that which an error of the
// filesystem means to a client, those of a context; else Unknown.
func Code(err error) codes.Code {
	var e *Error
	switch {
	case err == nil:
		return codes.OK
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return codes.DeadlineExceeded
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return codes.ResourceExhausted
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EIO), errors.Is(err, unix.EROFS):
		return codes.Internal
	}
	return codes.Unknown
}

// blame gives an error the code InvalidArgument if it is the tar's fault.
func blame(err error) error {
	if Code(err) == codes.Unknown && IsTarsFault(err) {
		return &Error{codes.InvalidArgument, err}
	}
	return err
}

// IsTarsFault tells an error that says that a name or the combination of entries cannot be, or that
// the tar is none.
func IsTarsFault(err error) bool {
	for _, fault := range []error{
		unix.ENAMETOOLONG, unix.ELOOP, unix.ENOTDIR, unix.EISDIR, unix.EINVAL, unix.EMLINK, unix.ERANGE, unix.E2BIG, unix.EFBIG, unix.EILSEQ,
		fs.ErrNotExist, fs.ErrExist, tar.ErrHeader, tar.ErrFieldTooLong, io.ErrUnexpectedEOF,
	} {
		if errors.Is(err, fault) {
			return true
		}
	}
	return false
}
