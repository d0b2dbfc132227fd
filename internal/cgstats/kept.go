package cgstats

import (
	"io"
	"sync/atomic"
)

// kept is something that is opened when it is first needed and stays open until
// close. There is no lock: of two who open it at the same time one closes its own again.
type kept[T io.Closer] struct {
	state atomic.Pointer[state[T]]
}

// state never changes. Without open it is the end.
type state[T io.Closer] struct {
	value T
	open  bool
}

// get returns what is kept. The error is ErrGone after close, else that of open.
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

// close may be called again.
func (k *kept[T]) close() error {
	s := k.state.Swap(&state[T]{})
	if s == nil || !s.open {
		return nil
	}
	return s.value.Close()
}
