// Package coded attaches gRPC's code to an error, in programs that do not link gRPC.
//
// # Contract
//
// The numbers are gRPC's. The code survives wrappers (%w). Package errdefs returns it in the
// daemon.
package coded

import (
	"errors"
	"fmt"
)

// Code is the number of a gRPC code.
type Code uint32

// The codes, as in google.golang.org/grpc/codes.
const (
	InvalidArgument   Code = 3
	ResourceExhausted Code = 8
	Aborted           Code = 10
	Internal          Code = 13
	Unavailable       Code = 14
)

type coded struct {
	code Code
	err  error
}

func (e *coded) Error() string { return e.err.Error() }
func (e *coded) Unwrap() error { return e.err }

// Errorf returns an error with a code. The format may use %w.
func Errorf(code Code, format string, args ...any) error {
	return &coded{code: code, err: fmt.Errorf(format, args...)}
}

// Of returns the code of the outermost wrapped error that Errorf returned.
func Of(err error) (Code, bool) {
	if c, ok := errors.AsType[*coded](err); ok {
		return c.code, true
	}
	return 0, false
}
