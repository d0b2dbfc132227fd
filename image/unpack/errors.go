package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"golang.org/x/sys/unix"

	"berth/image/unpack/inflate"
)

// Code is a gRPC code. Package codes would bring net and JSON into berth-unpack, and errdefs would
// bring protobuf.
type Code uint32

// Codes that errors of this package have. A layer that exceeds its limits is FailedPrecondition and
// not ResourceExhausted, because the same call cannot succeed later.
const (
	OK                 Code = 0
	Canceled           Code = 1
	Unknown            Code = 2
	InvalidArgument    Code = 3
	DeadlineExceeded   Code = 4
	ResourceExhausted  Code = 8
	FailedPrecondition Code = 9
	OutOfRange         Code = 11 // only from Pack; Layer may accept the tar
	Internal           Code = 13
	DataLoss           Code = 15

	// The following codes are not gRPC codes, see Status.
	MoreWindow Code = 100 // Limits.Window is too little
	MoreMemory Code = 101 // Limits.Memory is too little
	NoSpace    Code = 102 // the disk is full
)

// Status is the code of the answer to a client.
func (c Code) Status() Code {
	switch c {
	case MoreWindow, MoreMemory:
		return FailedPrecondition
	case NoSpace:
		return ResourceExhausted
	}
	return c
}

// Error is an error with a code.
type Error struct {
	Code Code
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Is makes an error of a full disk match ENOSPC also after it has crossed a process boundary.
func (e *Error) Is(target error) bool { return e.Code == NoSpace && target == unix.ENOSPC }

// refuse returns the error for a tar that is no layer.
func refuse(format string, args ...any) error {
	return &Error{InvalidArgument, fmt.Errorf(format, args...)}
}

// exceeds returns the error for a layer that exceeds its limits.
func exceeds(format string, args ...any) error {
	return &Error{FailedPrecondition, fmt.Errorf(format, args...)}
}

// CodeOf returns the code of an *Error, DataLoss for an *inflate.CorruptError, and
// FailedPrecondition for an *inflate.UnsupportedError. Errors of the filesystem and of contexts
// have codes, too. For other errors it returns Unknown.
func CodeOf(err error) Code {
	var e *Error
	var corrupt *inflate.CorruptError
	var unsupported *inflate.UnsupportedError
	switch {
	case err == nil:
		return OK
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, inflate.ErrWindow):
		return MoreWindow
	case errors.As(err, &unsupported):
		return FailedPrecondition
	case errors.As(err, &corrupt):
		return DataLoss
	case errors.Is(err, context.Canceled):
		return Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return DeadlineExceeded
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return NoSpace
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EIO), errors.Is(err, unix.EROFS):
		return Internal
	}
	return Unknown
}

// blame adds the code InvalidArgument to an error if the tar has caused it.
func blame(err error) error {
	if CodeOf(err) == Unknown && IsTarsFault(err) {
		return &Error{InvalidArgument, err}
	}
	return err
}

// IsTarsFault reports whether the tar has caused an error. The input may be no tar, or a name or a
// combination of entries may be invalid.
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
