package task

import (
	"fmt"
	"runtime/debug"
)

// Outcome is how a function ended that another goroutine runs than the one that waits for it.
type Outcome struct {
	Err      error
	panicked string // what it panicked with, and where
}

// Catch runs f and returns how it ended. A panic would end the daemon in any goroutine but one that guards itself.
func Catch(f func() error) (o Outcome) {
	defer func() {
		if p := recover(); p != nil {
			o.panicked = fmt.Sprintf("%v\n\nin another goroutine:\n%s", p, debug.Stack())
		}
	}()
	o.Err = f()
	return o
}

// Result returns the error, or goes on with the panic, for whoever guards the caller.
func (o Outcome) Result() error {
	if o.panicked != "" {
		panic(o.panicked)
	}
	return o.Err
}
