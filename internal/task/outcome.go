package task

import (
	"fmt"
	"runtime/debug"
)

// Outcome is the result of a function that ran in another goroutine: an error or a panic.
type Outcome struct {
	Err      error
	panicked string // the panic's value and stack
}

// Catch runs f and returns its outcome. An unrecovered panic in any goroutine would end the daemon.
func Catch(f func() error) (o Outcome) {
	defer func() {
		if p := recover(); p != nil {
			o.panicked = fmt.Sprintf("%v\n\nin another goroutine:\n%s", p, debug.Stack())
		}
	}()
	o.Err = f()
	return o
}

// Result returns the error, or panics again so that the caller's Guard handles the panic.
func (o Outcome) Result() error {
	if o.panicked != "" {
		panic(o.panicked)
	}
	return o.Err
}
