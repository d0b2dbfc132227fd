package fill

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// ErrLost is wrapped by the error of a layer whose data could not be made durable.
var ErrLost = errors.New("the data of the layer is lost")

// syncAll records filled spans until the Engine's end. It does so some time after the first span,
// or at once if much was filled.
func (e *Engine) syncAll() {
	ctx := e.life.Context()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.wakeSync:
		}
		e.gather(ctx)
		for _, l := range e.dirtyLayers() {
			if err := l.sync(ctx); err != nil && ctx.Err() == nil {
				l.giveUp(err, true)
			}
		}
	}
}

// gather waits until it is time to record what was filled.
func (e *Engine) gather(ctx context.Context) {
	alarm := time.After(e.cfg.Sync)
	for {
		select {
		case <-ctx.Done():
			return
		case <-alarm:
			return
		case <-e.wakeSync:
		}
		sum := int64(0)
		e.mu.Lock()
		for _, l := range e.layers {
			sum += l.dirty
		}
		e.mu.Unlock()
		if sum >= syncBytes {
			return
		}
	}
}

// dirtyLayers returns the layers with filled spans to record.
func (e *Engine) dirtyLayers() (list []*Layer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.layers {
		if l.dirty > 0 && l.failed == nil && !l.complete {
			list = append(list, l)
		}
	}
	return list
}

// sync makes the filled spans durable and records them. After an error the kernel may have dropped
// the data from memory. The layer then ends with DataLoss.
func (l *Layer) sync(ctx context.Context) error {
	select {
	case l.syncing <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-l.syncing }()
	if l.lost != nil {
		return l.lost
	}
	has, dirty := l.snapshot()
	if dirty == 0 {
		return nil
	}
	failpoint.Reach("lazy.sync-data")
	err := unix.Fdatasync(int(l.data.Fd()))
	failpoint.Reach("lazy.data-synced")
	if err == nil && l.blob != nil {
		err = unix.Fdatasync(int(l.blob.Fd()))
		failpoint.Reach("lazy.blob-synced")
	}
	if err != nil {
		l.lost = errdefs.New(codes.DataLoss, "sync the data of layer %s: %w: %w", l.name, ErrLost, err)
		return l.lost // the kernel reports an error once, so a second sync would succeed
	}
	if err := has.write(l.bits); err != nil {
		l.e.cfg.Log.Warn("cannot record what is filled of a layer; it will be filled again after a restart",
			"layer", l.name, "error", err)
		return nil
	}
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	l.dirty -= dirty
	return nil
}

// snapshot returns the filled spans, and the number of their bytes that are not recorded.
func (l *Layer) snapshot() (has bitmap, dirty int64) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	has = newBitmap(len(l.spans))
	for i, state := range l.spans {
		if state == filled {
			has.set(i)
		}
	}
	return has, l.dirty
}
