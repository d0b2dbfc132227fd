package fill

import (
	"slices"

	"golang.org/x/sys/unix"
)

// Taking over the events of an Engine that has ended.
//
// The kernel keeps a list of events that were read and not answered. An answer names an event by
// its descriptor number, and the kernel gives it to the first event in the list with this number.
// So a number must not be in the list twice. Otherwise the answer for one event could continue
// another event, whose range is missing. For the same reason, an answer that the dead Engine may
// have given must not be repeated when a new event could have the number.
//
// 1. In the state answering, the ranges of a slot are filled, because an answer follows the write.
// The new Engine repeats the answer at once, before it reads any new event.
//
// 2. In the state reading, the event of a slot was not answered. Until the answer, a descriptor of
// this process occupies its number. The Engine opens a descriptor for this purpose, unless the
// process already uses the number for something else.
//
// 3. If the process uses the number for something else, it may close that descriptor at any time.
// So new events are read only after such an event (strict) was answered.
//
// If a slot has no inode yet, the dead Engine was about to identify the event. The new Engine then
// fills the event's range in every incomplete layer, because one of them is the right one.

// takeOver takes the group and the ring of Config, and repeats answers.
func (e *Engine) takeOver() (err error) {
	if e.group, err = openGroup(e.cfg.Group); err != nil {
		return err
	}
	if e.ring, err = mapRing(e.cfg.Ring); err != nil {
		return err
	}
	list, free := e.ring.pending()
	for _, p := range list {
		if !p.answering {
			e.inherited = append(e.inherited, &waiter{event: p.event, descriptor: occupy(int(p.fd))})
			continue
		}
		if err := e.group.respond(p.fd, p.response); err != nil {
			return err // the process ends, or the caller starts without lazy layers
		}
		e.ring.end(p.slot)
		free = append(free, p.slot)
	}
	slices.Sort(free)
	e.setFree(free)
	return nil
}

// occupy opens a descriptor with the given number. It returns -1 if the number is in use.
func occupy(number int) int {
	fd, err := unix.Open("/dev/null", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	if fd == number {
		return fd
	}
	defer unix.Close(fd)
	got, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, number)
	if err != nil {
		return -1
	}
	if got != number {
		unix.Close(got)
		return -1
	}
	return got
}

// resume serves the events of the earlier Engine. It returns the events that must be answered
// before other events are read.
func (e *Engine) resume() (strict []*waiter) {
	list := e.inherited
	e.inherited = nil
	for _, w := range list {
		if w.descriptor < 0 {
			w.answered = make(chan struct{})
			strict = append(strict, w)
		}
		layers := e.layersOf(w)
		if len(layers) == 0 {
			// All incomplete layers are loaded, so this one was removed.
			e.denyAll([]*waiter{w})
			continue
		}
		e.admit(w, layers...)
	}
	return strict
}

// layersOf returns the layers that an earlier Engine's event may belong to.
func (e *Engine) layersOf(w *waiter) (list []*Layer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.layers[w.inode]; l != nil {
		return []*Layer{l}
	}
	if w.inode != 0 {
		return nil
	}
	for _, l := range e.layers {
		if l.failed == nil {
			list = append(list, l)
		}
	}
	return list
}
