package state

import "sync/atomic"

// Answer caches the encoding of a snapshot for lists. kubelet lists all objects each second, and
// few objects change between two lists. A nil Answer caches nothing.
type Answer struct{ encoded atomic.Pointer[[]byte] }

// Get returns the cached encoding, or calls encode and caches its result. Concurrent callers may
// each encode the same result.
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
