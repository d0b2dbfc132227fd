package errdefs

import (
	"errors"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// scarce are the errors of an exhausted resource, independent of the operation. A client may retry
// when the node has room again. A read-only filesystem needs repair first.
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

// Scarce adds the gRPC code to an error that wraps the errno of an exhausted resource: room on a
// filesystem, descriptors, memory or processes. It returns all other errors unchanged, including
// errors that have a more specific code.
func Scarce(err error) error {
	if code := Code(err); code != codes.Unknown && code != codes.Internal {
		return err
	}
	for _, s := range scarce {
		if errors.Is(err, s.errno) {
			return New(s.code, "%w", err)
		}
	}
	// EAGAIN has many meanings. If fork returns it, the limit of processes is reached.
	var path *fs.PathError
	if errors.As(err, &path) && path.Op == "fork/exec" && errors.Is(path.Err, unix.EAGAIN) {
		return New(codes.ResourceExhausted, "%w", err)
	}
	return err
}

// IsUnwritable reports whether an operation failed because a filesystem is full or read-only.
func IsUnwritable(err error) bool {
	return errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// Reported returns an error that another process reported as text. If code is Internal and the text
// ends with the message of an exhausted resource, the error has the code of that resource.
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
