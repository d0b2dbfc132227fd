// Package cleanup collects the undo steps of an operation in one list.
//
//	undo := cleanup.New()
//	defer undo.Run(&err)
//	... do a step ...
//	undo.Add("unmount "+path, func() error { return unix.Unmount(path, 0) })
//	...
//	undo.Release() // success: keep everything
package cleanup

import (
	"errors"
	"fmt"
)

// List is a stack of undo steps. It is not safe for concurrent use.
type List struct{ steps []step }

type step struct {
	name string
	undo func() error
}

// New returns an empty list.
func New() *List { return &List{} }

// Add pushes an undo step. The name appears in the step's error.
func (l *List) Add(name string, undo func() error) { l.steps = append(l.steps, step{name, undo}) }

// Release drops all steps, because the operation has succeeded.
func (l *List) Release() { l.steps = nil }

// Run executes all steps, newest first, and joins their errors to *err. It is meant to be deferred.
func (l *List) Run(err *error) {
	for i := len(l.steps) - 1; i >= 0; i-- {
		if e := l.steps[i].undo(); e != nil {
			*err = errors.Join(*err, fmt.Errorf("undo: %s: %w", l.steps[i].name, e))
		}
	}
	l.steps = nil
}
