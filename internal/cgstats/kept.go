package cgstats

import (
	"io"
	"sync/atomic"
)

// kept opens an object at its first use and keeps it open until close. It has no lock. If two
// goroutines open an object at the same time, one of them closes its object again.
type kept[T io.Closer] struct {
	state atomic.Pointer[state[T]]
}

// state is immutable. If open is nil, kept is closed.
type state[T io.Closer] struct {
	value T
	open  bool
}

// get returns the kept object. The error is ErrGone after close, otherwise an error of open.
func (k *kept[T]) get(open func() (T, error)) (none T, err error) {
	if s := k.state.Load(); s != nil {
		return s.result()
	}
	value, err := open()
	if err != nil {
		return none, err
	}
	opened := &state[T]{value: value, open: true}
	if k.state.CompareAndSwap(nil, opened) {
		return value, nil
	}
	if err := value.Close(); err != nil {
		return none, err
	}
	return k.state.Load().result()
}

func (s *state[T]) result() (none T, err error) {
	if !s.open {
		return none, ErrGone
	}
	return s.value, nil
}

// close may be called more than once.
func (k *kept[T]) close() error {
	s := k.state.Swap(&state[T]{})
	if s == nil || !s.open {
		return nil
	}
	return s.value.Close()
}
