package shim

import (
	"errors"
	"os"
	"sync"
	"time"
)

// hearTime is how long a launcher may take to read its order. One that is alive does so in a millisecond; one that is frozen never
// does, and would keep who waits for it for as long as a launch may take.
const hearTime = 10 * time.Second

// errDeaf says that a launcher did not read its order, so that another may be given it.
var errDeaf = errors.New("the launcher does not read its order")

// hearing watches whether a launcher reads what was sent to it. The lock guards what follows it.
type hearing struct {
	p     *launcher
	timer *time.Timer

	mu         sync.Mutex
	over, deaf bool
}

// listen begins when an order was sent. If that is not read within limit, the wait for a reply to it ends.
func (p *launcher) listen(limit time.Duration) *hearing {
	h := &hearing{p: p}
	h.timer = time.AfterFunc(limit, h.look)
	return h
}

func (h *hearing) look() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return
	}
	if unread, err := h.p.conn.Unread(); err == nil && unread > 0 {
		h.deaf = true
		_ = h.p.conn.SetDeadline(time.Unix(1, 0)) // it fails on a closed connection, when nobody waits
	}
}

// result ends it. It is errDeaf if err comes of that, else err.
func (h *hearing) result(err error) error {
	h.timer.Stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	if !h.deaf {
		return err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errDeaf
	}
	// It has read and replied just now. The deadline is not to hit who waits for the next reply.
	return errors.Join(err, h.p.conn.SetDeadline(time.Time{}))
}

// notSent is errDeaf for an order that could not be sent because the launcher reads nothing, else err.
func notSent(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errDeaf
	}
	return err
}
