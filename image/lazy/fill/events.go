package fill

import (
	"container/list"
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// waiter is an access that waits for its answer.
type waiter struct {
	event
	descriptor int           // to close after the answer; -1: none
	answered   chan struct{} // closed after the answer; nil: nobody waits for it

	// The Engine's mu guards the fields below.
	missing  int           // spans that the access still needs
	spans    []spanRef     // all of them, filled or not
	waits    *list.Element // its element in Engine.stalling; nil: it does not wait
	since    time.Time     // when it began to wait; zero: it did not
	deadline time.Time
}

// spanRef is a span of a layer.
type spanRef struct {
	layer *Layer
	span  int
}

// release closes the waiter's descriptor.
func (w *waiter) release() {
	if w.descriptor >= 0 {
		unix.Close(w.descriptor) // nothing was written through it
	}
}

// serve reads events and answers the events of filled ranges. Before it reads the first event, it
// waits until all events in strict are answered.
func (e *Engine) serve(strict []*waiter) {
	ctx := e.life.Context()
	for _, w := range strict {
		select {
		case <-w.answered:
		case <-ctx.Done():
			return
		}
	}
	defer context.AfterFunc(ctx, func() {
		_ = e.group.file.SetReadDeadline(time.Unix(1, 0)) // it fails only if the file is closed
	})()
	for {
		select {
		case slot := <-e.free:
			if !e.serveOne(slot) {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// serveOne reads one event into a free slot of the ring. It returns false at the Engine's end.
func (e *Engine) serveOne(slot int) bool {
	p := e.ring.prepare(slot)
	failpoint.Reach("lazy.read-event")
	err := e.group.read(p)
	failpoint.Reach("lazy.event-read")
	if err != nil {
		e.ring.end(slot)
		e.free <- slot
		if e.life.Context().Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
			return false
		}
		// The kernel has denied the access, for example for lack of memory.
		e.warnAnswer.Warn(e.cfg.Log, "cannot read an access of an incomplete layer", "error", err)
		return true
	}
	ev, err := e.ring.event(slot)
	if err != nil {
		e.cfg.Log.Error("unknown fanotify event", "error", err)
		e.ring.end(slot)
		e.free <- slot
		return true
	}
	e.handle(&waiter{event: ev, descriptor: int(ev.fd)})
	return true
}

// handle answers an event, or makes it wait.
func (e *Engine) handle(w *waiter) {
	e.counts.events.Add(1)
	var st unix.Stat_t
	if err := unix.Fstat(w.descriptor, &st); err != nil {
		e.cfg.Log.Error("cannot identify the file of an access", "error", err)
		e.answer(w, denyEIO)
		return
	}
	w.inode = st.Ino
	e.ring.setInode(w.slot, st.Ino)
	e.mu.Lock()
	l := e.layers[st.Ino]
	e.mu.Unlock()
	if l == nil {
		e.answer(w, e.unknown(w.descriptor, st.Ino))
		return
	}
	e.admit(w, l)
}

// unknown returns the response to an access of a file that is no layer of the Engine. The layer may
// have become complete and may have been closed since.
func (e *Engine) unknown(fd int, inode uint64) uint32 {
	incomplete, err := isIncomplete(fd)
	if err == nil && !incomplete {
		return allow
	}
	e.counts.denied.Add(1)
	e.warnUnknown.Warn(e.cfg.Log, "access of an incomplete layer that is not loaded: it failed",
		"inode", inode, "error", err)
	return denyEIO
}

// admit answers an access of layers, or makes it wait for their spans.
func (e *Engine) admit(w *waiter, layers ...*Layer) {
	e.mu.Lock()
	response, now := e.decide(w, layers)
	e.mu.Unlock()
	if now {
		e.answer(w, response)
		return
	}
	e.counts.waited.Add(1)
}

// decide makes an access wait, or returns the response to it. The caller holds mu.
func (e *Engine) decide(w *waiter, layers []*Layer) (response uint32, now bool) {
	for _, l := range layers {
		if !l.want(w) {
			e.detach(w)
			l.noteRefused()
			e.counts.denied.Add(1)
			return denyEIO, true
		}
	}
	if w.missing == 0 {
		return allow, true
	}
	w.since = time.Now()
	w.deadline = w.since.Add(e.cfg.Stall)
	w.waits = e.stalling.PushBack(w)
	signal(e.wakeStall)
	for _, l := range layers {
		l.kick()
	}
	return 0, false
}

// detach removes an access from the spans that it waits for. The caller holds mu and answers it.
func (e *Engine) detach(w *waiter) {
	for _, at := range w.spans {
		at.layer.forget(at.span, w)
	}
	w.spans = nil
	if w.waits != nil {
		e.stalling.Remove(w.waits)
		w.waits = nil
	}
}

// answer answers an access. Only one goroutine may call it for an access.
func (e *Engine) answer(w *waiter, response uint32) {
	e.ring.begin(w.slot, response)
	failpoint.Reach("lazy.answer")
	err := e.group.respond(w.fd, response)
	if err != nil && response != allow {
		err = e.group.respond(w.fd, unix.FAN_DENY) // this kernel does not accept errors in answers
	}
	failpoint.Reach("lazy.answered")
	if err != nil {
		e.warnAnswer.Warn(e.cfg.Log, "cannot answer an access of an incomplete layer", "error", err)
	}
	if !w.since.IsZero() {
		e.cfg.Waited(time.Since(w.since))
	}
	e.ring.end(w.slot)
	w.release() // last, because the number may be used again
	if w.answered != nil {
		close(w.answered)
	}
	e.free <- w.slot
}

// denyAll denies accesses. The caller has detached them and does not hold mu.
func (e *Engine) denyAll(list []*waiter) {
	for _, w := range list {
		e.counts.denied.Add(1)
		e.answer(w, denyEIO)
	}
}

// denyStalled denies accesses that have waited for too long, until the Engine's end.
func (e *Engine) denyStalled() {
	ctx := e.life.Context()
	for ctx.Err() == nil {
		next, late, layers := e.stalled(time.Now())
		for l := range layers {
			l.warnStalled()
		}
		e.denyAll(late)
		var alarm <-chan time.Time
		if !next.IsZero() {
			alarm = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
		case <-alarm:
		case <-e.wakeStall:
		}
	}
}

// stalled detaches the accesses whose deadline is over. It returns them, their layers, and the next
// deadline or the zero time.
func (e *Engine) stalled(now time.Time) (next time.Time, late []*waiter, layers map[*Layer]bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	layers = map[*Layer]bool{}
	for at := e.stalling.Front(); at != nil; at = e.stalling.Front() {
		w := at.Value.(*waiter) //nolint:forcetypeassert // the list has nothing else
		if now.Before(w.deadline) {
			return w.deadline, late, layers
		}
		noted := map[*Layer]bool{}
		for _, at := range w.spans {
			layers[at.layer] = true
			at.layer.stalled = now
			if !noted[at.layer] {
				noted[at.layer] = true
				at.layer.noteRefused()
			}
		}
		e.detach(w)
		late = append(late, w)
	}
	return time.Time{}, late, layers
}

// signal wakes the goroutine that reads from c.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is awake already
	}
}
