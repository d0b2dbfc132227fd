package errdefs

import (
	"errors"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// scarce are the errors that say that the node lacks something, whatever was done when
// that was found out. A client may come again when there is room; a filesystem that became
// read-only has to be mended first.
var scarce = []struct {
	errno unix.Errno
	code  codes.Code
}{
	{unix.ENOSPC, codes.ResourceExhausted},
	{unix.EDQUOT, codes.ResourceExhausted},
	{unix.EMFILE, codes.ResourceExhausted},
	{unix.ENFILE, codes.ResourceExhausted},
	{unix.ENOMEM, codes.ResourceExhausted},
	{unix.EROFS, codes.FailedPrecondition},
}

// Scarce gives an error that no layer had a better code for the one of what the node lacks, if it
// is for that: room on a filesystem, descriptors, memory, processes. Every other error is returned as it is.
func Scarce(err error) error {
	if code := Code(err); code != codes.Unknown && code != codes.Internal {
		return err
	}
	for _, s := range scarce {
		if errors.Is(err, s.errno) {
			return New(s.code, "%w", err)
		}
	}
	// EAGAIN has many meanings; of a fork it says that there are too many processes.
	var path *fs.PathError
	if errors.As(err, &path) && path.Op == "fork/exec" && path.Err == unix.EAGAIN {
		return New(codes.ResourceExhausted, "%w", err)
	}
	return err
}

// IsUnwritable tells whether an operation failed because a filesystem takes nothing at the moment: it is full, or
// read-only.
func IsUnwritable(err error) bool {
	return errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// Reported returns an error that another process reported as text, with a code, or with that of what
// the node lacks, if the text ends by saying so and the code is Internal.
func Reported(code codes.Code, text string) error {
	if code == codes.Internal {
		for _, s := range scarce {
			if strings.HasSuffix(text, ": "+s.errno.Error()) {
				return New(s.code, "%s", text)
			}
		}
	}
	return New(code, "%s", text)
}
