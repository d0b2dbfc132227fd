package state

import "sync/atomic"

// Answer is what a reader tells of a snapshot, encoded when it was first asked for and kept as long as the snapshot: kubelet lists
// everything every second, and hardly anything has changed. nil keeps nothing.
type Answer struct{ encoded atomic.Pointer[[]byte] }

// Get returns what was kept, or what encode returns, and keeps that. Several readers may encode at the same time, the same.
func (a *Answer) Get(encode func() ([]byte, error)) ([]byte, error) {
	if a == nil {
		return encode()
	}
	if kept := a.encoded.Load(); kept != nil {
		return *kept, nil
	}
	encoded, err := encode()
	if err == nil {
		a.encoded.Store(&encoded)
	}
	return encoded, err
}
