package fill

import (
	"slices"

	"golang.org/x/sys/unix"
)

// Taking over the events of an Engine that has ended.
//
// The kernel keeps a list of events that were read and not answered. An answer names one by its
// descriptor number, and goes to the first in the list with that number. So a number must not be in
// the list twice: the answer for the one event could continue the other, whose range is missing.
// And an answer that the dead Engine may have given already must not be given again once a new
// event could have the number.
//
// 1. Slots in the state answering: the ranges are filled, because an answer follows the write. The
// same answer is given again at once, before any new event is read.
//
// 2. Slots in the state reading that have an event: it was not answered. Its number is occupied in
// this process until it is: by a descriptor that is opened for that, or by one that this process
// uses for something else.
//
// 3. In the latter case nothing keeps that other descriptor open. So new events are read only
// after such an event was answered (strict).
//
// A slot in which the inode is still missing has an event that the dead Engine was about to
// identify. Its range is filled in every incomplete layer: one of them is the right one.

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

// resume serves the events of the earlier Engine. It returns those that must be answered before
// other events are read.
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
