package errdefs

import "errors"

// superseded is the error of an operation that another request ended.
type superseded struct{ error }

func (e superseded) Unwrap() error { return e.error }

// Superseded marks the error of an operation that ended because another request demanded the
// opposite. An example is the start of a container whose pod is being stopped. The client gets the
// error, but the log needs no warning.
func Superseded(err error) error {
	if err == nil {
		return nil
	}
	return superseded{err}
}

// IsSuperseded reports whether an error has this mark.
func IsSuperseded(err error) bool {
	var s superseded
	return errors.As(err, &s)
}
