// Package cli provides what berth's commands share: arguments, exit codes, interrupts, tables,
// JSON, and numbers and times for people.
package cli

import (
	"errors"
	"fmt"
	"io"
)

// ExitStatus is an error that makes berth exit with Code. With a nil Cause berth prints nothing,
// because the container's own output explains the failure.
type ExitStatus struct {
	Code  int
	Cause error
}

func (e *ExitStatus) Error() string {
	if e.Cause == nil {
		return fmt.Sprintf("exit status %d", e.Code)
	}
	return e.Cause.Error()
}

func (e *ExitStatus) Unwrap() error { return e.Cause }

// ExitCode prints err to stderr, except for an ExitStatus without a cause. It returns berth's exit
// code: 0 for nil, an ExitStatus's code, 1 for other errors.
func ExitCode(err error, stderr io.Writer) int {
	if err == nil {
		return 0
	}
	var status *ExitStatus
	known := errors.As(err, &status)
	if !known || status.Cause != nil {
		fmt.Fprintln(stderr, "berth:", err)
	}
	if known {
		return status.Code
	}
	return 1
}

// Silent removes the cause of an ExitStatus, so that berth prints nothing. Commands that an
// operator normally ends with Ctrl-C use it.
func Silent(err error) error {
	var status *ExitStatus
	if errors.As(err, &status) {
		return &ExitStatus{Code: status.Code}
	}
	return err
}
