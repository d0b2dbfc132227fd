package task

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Timeouts of the phases of End: operations in progress, then cancelled operations that roll back,
// then all other goroutines.
const (
	graceTimeout      = 10 * time.Second
	operationsTimeout = 25 * time.Second
	restTimeout       = 5 * time.Second
)

// End prevents new operations and waits for the work in progress until ctx ends. When it cancels
// operations it calls leave, because cancellation does not interrupt all of their waits. The next
// daemon continues unfinished operations and rollbacks. If operations remain, idle is false and the
// error names them.
func (r *Runner) End(ctx context.Context, leave func()) (idle bool, err error) {
	r.Operations.Close()
	r.Background.Close()
	r.Background.Cancel()
	grace, cancel := context.WithTimeout(ctx, graceTimeout)
	defer cancel()
	if err = r.Operations.Wait(grace); err != nil {
		err = fmt.Errorf("operations still in progress: %w", err)
	}
	_ = r.Background.Wait(grace) // most operations end at once; the check below is repeated for operations of plugins, which take longer
	r.Operations.Cancel()
	leave()
	rollback, cancel := context.WithTimeout(ctx, operationsTimeout)
	defer cancel()
	ended := r.Operations.Wait(rollback)
	err = errors.Join(err, ended)
	r.Watchers.Close() // watchers end last, because operations wait for exits that watchers report
	r.Watchers.Cancel()
	err = errors.Join(err, r.Watchers.WaitFor(restTimeout))
	if r.Background.WaitFor(restTimeout) != nil {
		r.Log.Info("removal continues after the next start")
	}
	return ended == nil, err
}
