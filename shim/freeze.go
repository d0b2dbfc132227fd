package shim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/internal/errdefs"
	"berth/shim/proto"
)

// Frozen is a container that its monitor has frozen for this process. The monitor thaws it if the
// connection ends, so a container never stays frozen after its client has ended.
type Frozen struct {
	c      *client
	thawed chan error    // the answer to FrameThaw, or the end of the connection; capacity 1
	lost   chan struct{} // closed when the connection has ended
	reader sync.WaitGroup
}

// thawTimeout bounds the wait for the answer to FrameThaw.
const thawTimeout = 5 * time.Second

// Freeze freezes all processes in a cgroup directory of the container, and returns when they are
// frozen. The monitor thaws them after timeout at the latest. The caller must call Thaw.
//
// The error is FailedPrecondition if the container is not running, or if its monitor is of berth
// 0.2. Other errors mean that the processes do not freeze, and continue to run.
func (m *Monitor) Freeze(ctx context.Context, dir string, timeout time.Duration) (*Frozen, error) {
	c, err := m.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("freeze: %w", err)
	}
	stop := context.AfterFunc(ctx, c.Interrupt)
	err = c.Send(proto.FrameFreeze, proto.FreezeRequest{Timeout: timeout, Dir: dir}.Encode())
	if err == nil {
		err = c.answer()
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("freeze: %w", explainOldMonitor(err)), c.Close())
	}
	f := &Frozen{c: c, thawed: make(chan error, 1), lost: make(chan struct{})}
	f.reader.Go(f.read)
	return f, nil
}

// explainOldMonitor replaces the answer of a monitor that does not know the request.
func explainOldMonitor(err error) error {
	if status.Code(err) == codes.Internal && status.Convert(err).Message() == "unknown request" {
		return errdefs.FailedPrecondition("the container's monitor is of an older berth, which cannot freeze it; restart the container")
	}
	return err
}

// read waits for the answer to FrameThaw and for the end of the connection.
func (f *Frozen) read() {
	defer close(f.lost)
	f.thawed <- f.c.answer()
}

// Lost is closed when the monitor has ended the connection. Then the monitor or the container has
// ended. The container may then run again.
func (f *Frozen) Lost() <-chan struct{} { return f.lost }

// Thaw lets the processes run again and waits until the monitor has done so. An error means that
// the monitor or the container has ended, or that the timeout of Freeze was over. Then the
// processes have run meanwhile. The processes run in any case.
func (f *Frozen) Thaw() error {
	timer := time.AfterFunc(thawTimeout, f.c.Interrupt)
	err := f.c.Send(proto.FrameThaw, nil)
	if err == nil {
		err = <-f.thawed
	}
	timer.Stop()
	f.c.Interrupt()
	f.reader.Wait()
	if err := errors.Join(err, f.c.Close()); err != nil {
		return fmt.Errorf("thaw: %w", err)
	}
	return nil
}
