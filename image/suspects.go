package image

import (
	"crypto/sha256"
	"errors"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/image/layer"
	"berth/image/lazy"
	blobindex "berth/image/lazy/index"
)

// maxSuspects limits the nodes whose indexes wait for a verdict.
const maxSuspects = 64

// suspects are nodes whose indexes did not fit the bytes of a registry. Either of the two was
// wrong. The next pull fetches the whole blob. That shows which, because it takes the true states
// of the blob's hash.
type suspects struct {
	mu     sync.Mutex // guards byBlob
	byBlob map[digest.Digest]suspect
}

type suspect struct {
	peer   string // address
	states [sha256.Size]byte
}

// add notes the states that a node has sent. If there are too many suspects, it forgets another
// one.
func (s *suspects) add(blob digest.Digest, peer string, states []blobindex.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byBlob == nil {
		s.byBlob = map[digest.Digest]suspect{}
	}
	for other := range s.byBlob { // any
		if len(s.byBlob) < maxSuspects {
			break
		}
		delete(s.byBlob, other)
	}
	s.byBlob[blob] = suspect{peer, sumOf(states)}
}

// has reports whether a blob waits for the verdict.
func (s *suspects) has(blob digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.byBlob[blob]
	return ok
}

// settle returns the node that has sent false states of a blob, or "". It forgets the suspect.
func (s *suspects) settle(blob digest.Digest, states []blobindex.State) (peer string) {
	s.mu.Lock()
	found, ok := s.byBlob[blob]
	delete(s.byBlob, blob)
	s.mu.Unlock()
	if !ok || found.states == sumOf(states) {
		return ""
	}
	return found.peer
}

func sumOf(states []blobindex.State) (sum [sha256.Size]byte) {
	h := sha256.New()
	for i := range states {
		h.Write(states[i][:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// suspect acts on a layer with the index of another node that has failed. A node whose index is
// shown to be wrong is banned. If the index and the bytes of a registry do not fit together, the
// next pull of the whole blob decides.
func (s *Store) suspect(blob digest.Digest, states []blobindex.State, claim *layer.Claim, failed error) {
	switch {
	case errors.Is(failed, blobindex.ErrMismatch):
		s.suspects.add(blob, claim.Peer, states)
		if own, err := s.indexer.store.Get(blob); err == nil { // of a pull from another registry
			s.settleSuspect(blob, own.States)
		}
	case errors.Is(failed, lazy.ErrWrongIndex):
		s.log.Error("another node has sent a wrong index", "peer", claim.Peer, "blob", blob, "error", failed)
		s.distrusted.ban(s.peers.Load(), claim.Peer)
	}
}

// settleSuspect bans the node that has sent false states of a blob. states are the true ones.
func (s *Store) settleSuspect(blob digest.Digest, states []blobindex.State) {
	if peer := s.suspects.settle(blob, states); peer != "" {
		s.log.Error("another node has sent an index with false states of the blob's hash", "peer", peer, "blob", blob)
		s.distrusted.ban(s.peers.Load(), peer)
	}
}
