package errdefs

import "errors"

// superseded is an error of an operation that another request has ended.
type superseded struct{ error }

func (e superseded) Unwrap() error { return e.error }

// Superseded marks the error of an operation that ended because another request wanted the
// opposite: the start of a container whose pod is being stopped, say. The client is told; an
// operator need not be warned.
func Superseded(err error) error {
	if err == nil {
		return nil
	}
	return superseded{err}
}

// IsSuperseded tells whether an error is marked so.
func IsSuperseded(err error) bool {
	var s superseded
	return errors.As(err, &s)
}
