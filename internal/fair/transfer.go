package fair

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// ErrStalled is the error of a stalled transfer, and the cause of its cancellation.
var ErrStalled = errors.New("transfer stalled")

// Meter measures the rate of a transfer. It is not safe for concurrent use.
type Meter struct {
	Window time.Duration // length of a window: the transfer is judged after so much waiting time
	Rate   int64         // least bytes a second

	waited time.Duration // since got was last zero
	got    int64
}

// Slow records how long a number of bytes took. It reports whether the transfer is too slow.
func (m *Meter) Slow(bytes int64, took time.Duration) bool {
	m.got += bytes
	if m.waited += took; m.waited < m.Window {
		return false
	}
	slow := float64(m.got) < float64(m.Rate)*m.waited.Seconds()
	m.got, m.waited = 0, 0
	return slow
}

// Left returns the time to the end of the window.
func (m *Meter) Left() time.Duration { return m.Window - m.waited }

// Body is a response body that fails with ErrStalled if it is too slow. A Read is too slow if it
// gets no byte for a window. All Reads of a window together are too slow if their rate is below the
// limit. Time between Reads does not count. It is not safe for concurrent use.
type Body struct {
	body   io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	whole  *time.Timer // nil: no limit for the whole body
	meter  Meter
}

// NewBody guards the body of a response. ctx is the context of the request, and cancel ends the
// request.
func NewBody(ctx context.Context, cancel context.CancelCauseFunc, body io.ReadCloser, meter Meter) *Body {
	timer := time.AfterFunc(meter.Window, func() { cancel(ErrStalled) })
	timer.Stop()
	return &Body{body: body, ctx: ctx, cancel: cancel, timer: timer, meter: meter}
}

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	began := time.Now()
	b.timer.Reset(b.meter.Window)
	n, err := b.body.Read(p)
	b.timer.Stop()
	if err == nil && b.meter.Slow(int64(n), time.Since(began)) {
		b.cancel(ErrStalled)
		return n, fmt.Errorf("%w: less than %d bytes a second for %v", ErrStalled, b.meter.Rate, b.meter.Window)
	}
	if err != nil && err != io.EOF && errors.Is(context.Cause(b.ctx), ErrStalled) { //nolint:errorlint // io.Reader
		err = fmt.Errorf("%w: no bytes for %v", ErrStalled, b.meter.Window)
	}
	return n, err
}

// SetWindow changes the window, for tests. It must not be called concurrently with Read.
func (b *Body) SetWindow(d time.Duration) { b.meter.Window = d }

// Hurry limits the whole body to the window. An error's text is not worth a longer wait.
func (b *Body) Hurry() {
	b.whole = time.AfterFunc(b.meter.Window, func() { b.cancel(ErrStalled) })
}

// Close ends the request.
func (b *Body) Close() error {
	b.timer.Stop()
	if b.whole != nil {
		b.whole.Stop()
	}
	b.cancel(nil)
	return b.body.Close()
}
