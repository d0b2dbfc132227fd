package task

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// What End waits for: operations under way, then, after it told everything to end, those that are taken back, a launch for
// one, and the rest.
const (
	graceLimit      = 10 * time.Second
	operationsLimit = 25 * time.Second
	restLimit       = 5 * time.Second
)

// End lets nothing new start, and waits for what is under way, until ctx ends at most. The next daemon goes on with operations that
// did not end, and with what was being undone. leave is called when operations are told to end: what these wait for elsewhere is
// not interrupted by that. idle is false if there still are operations; the error tells what did not end.
func (r *Runner) End(ctx context.Context, leave func()) (idle bool, err error) {
	r.Operations.Close()
	r.Background.Close()
	r.Background.Cancel()
	grace, cancel := context.WithTimeout(ctx, graceLimit)
	defer cancel()
	if err = r.Operations.Wait(grace); err != nil {
		err = fmt.Errorf("operations still under way: %w", err)
	}
	_ = r.Background.Wait(grace) // most of it ends at once, plugins may take their time; see below
	r.Operations.Cancel()
	leave()
	takingBack, cancel := context.WithTimeout(ctx, operationsLimit)
	defer cancel()
	ended := r.Operations.Wait(takingBack)
	err = errors.Join(err, ended)
	r.Watchers.Close() // operations wait for exits, so watchers end after them
	r.Watchers.Cancel()
	err = errors.Join(err, r.Watchers.WaitFor(restLimit))
	if r.Background.WaitFor(restLimit) != nil {
		r.Log.Info("clearing away goes on with the next start")
	}
	return ended == nil, err
}
