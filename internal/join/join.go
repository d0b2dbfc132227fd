// Package join makes creating things idempotent: who asks again while the first
// request is under way joins it, and who asks afterwards gets what was made.
package join

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"berth/internal/errdefs"
)

// Fingerprint tells whether two requests are the same.
type Fingerprint [sha256.Size]byte

// Of is the fingerprint of a request; its messages are encoded deterministically.
func Of(messages ...proto.Message) (Fingerprint, error) {
	h := sha256.New()
	for _, msg := range messages {
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(msg)
		if err != nil {
			return Fingerprint{}, errdefs.InvalidArgument("encode request: %w", err)
		}
		fmt.Fprintf(h, "%d:", len(data))
		h.Write(data)
	}
	return Fingerprint(h.Sum(nil)), nil
}

// creation is one object being made, or made.
type creation struct {
	sum  Fingerprint
	done chan struct{} // closed when id and err are final
	id   string
	err  error

	// Under the Joiner's lock:
	waiting   int      // callers that will be told the ID
	delivered bool     // somebody was told
	going     bool     // its removal has begun and can't be taken back
	removal   *removal // not nil: a caller who wants its place is having it removed
}

// removal is one try to end an object, for a caller who wants its place.
type removal struct {
	done chan struct{} // closed when err is final
	err  error
}

// ErrInUse is what Maker.Remove returns for an object that somebody uses.
var ErrInUse = errors.New("in use")

// Joiner makes creating idempotent: for each identity there is at most one
// creation, which later calls with the same content join.
//
// A call with another content gets AlreadyExists, unless nobody was ever told of
// the object and nobody uses it: then its caller has given up, and asks again.
// (kubelet never sends the same container twice: the path of the termination log is
// made up anew for each request.) Such an object is removed and made anew.
//
// Nobody is told of an object whose removal has begun (Going): who asks waits until it is
// gone, and gets a new one.
//
// The lock guards the map and the creations' own fields and is held for no more.
type Joiner struct {
	mu sync.Mutex
	by map[string]*creation
}

// Maker makes objects of one kind for a Joiner.
type Maker struct {
	// Spawn starts a goroutine; false: the manager is closing.
	Spawn func(func()) bool
	// Make makes the object.
	Make func() (id string, err error)
	// Remove takes away an object that nobody was told of, or goes on with a removal that
	// has begun; it returns when the object is gone. ErrInUse, and nothing is removed, if somebody has found the
	// object by other means and uses it: that is decided where nobody can begin to meanwhile.
	Remove func(ctx context.Context, id string) error
}

// Create returns the ID of the object of that identity: of the existing one, of
// the one being made, or of the one that it makes. A creation that failed leaves
// no trace. Errors do not name the identity: the caller does.
func (j *Joiner) Create(ctx context.Context, identity string, sum Fingerprint, mk Maker) (string, error) {
	for {
		c, mine, joined, going := j.enter(identity, sum)
		if mine && !mk.Spawn(func() { id, err := mk.Make(); j.finish(identity, c, id, err) }) {
			j.finish(identity, c, "", errdefs.Unavailable("berth is stopping"))
		}
		if joined {
			return j.await(ctx, c)
		}
		if going == nil {
			if err := waitDone(ctx, c.done); err != nil {
				return "", err
			}
			if c.err != nil {
				continue // it left no trace
			}
			if going = j.replace(c, mk); going == nil {
				return "", inUse(c)
			}
		}
		if err := waitDone(ctx, going.done); err != nil {
			return "", err
		}
		switch {
		case going.err == nil:
		case !errors.Is(going.err, ErrInUse):
			return "", fmt.Errorf("replace %s: %w", c.id, going.err)
		case c.sum != sum:
			return "", inUse(c)
		}
	}
}

func inUse(c *creation) error {
	return errdefs.AlreadyExists("it exists (%s) with another configuration", c.id)
}

func waitDone(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for an earlier request to end: %w", ctx.Err())
	}
}

// replace begins to remove an object that nobody was told of, or goes on with the removal of
// one that is going; nil if it is neither. It goes on without its caller; if it fails the object
// stays, to be replaced by the next who asks.
func (j *Joiner) replace(c *creation, mk Maker) *removal {
	going, mine := j.claim(c)
	if !mine {
		return going
	}
	if !mk.Spawn(func() { j.release(c, mk.Remove(context.Background(), c.id)) }) { // the operation has its own limit
		j.release(c, errdefs.Unavailable("berth is stopping"))
	}
	return going
}

// enter returns the creation of that identity, a new one if there is none; joined: the caller is
// counted in, to be told the ID. One that is being removed it returns with what to wait for, if
// there is something.
func (j *Joiner) enter(identity string, sum Fingerprint) (c *creation, mine, joined bool, going *removal) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c = j.by[identity]
	if c == nil {
		c, mine = &creation{sum: sum, done: make(chan struct{})}, true
		j.put(identity, c)
	}
	if c.removal != nil {
		return c, false, false, c.removal
	}
	if joined = c.sum == sum && !c.going; joined {
		c.waiting++
	}
	return c, mine, joined, nil
}

func (j *Joiner) put(identity string, c *creation) {
	if j.by == nil {
		j.by = map[string]*creation{}
	}
	j.by[identity] = c
}

func (j *Joiner) await(ctx context.Context, c *creation) (string, error) {
	told := false
	defer func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		c.waiting--
		c.delivered = c.delivered || told
	}()
	select {
	case <-c.done:
		told = c.err == nil && ctx.Err() == nil
		return c.id, c.err
	case <-ctx.Done():
		return "", fmt.Errorf("goes on without its caller: %w", ctx.Err())
	}
}

// claim marks the object as being removed by the caller (mine), if it is going or nobody knows
// of it. If another caller was faster it returns what that one does, and else nil.
func (j *Joiner) claim(c *creation) (going *removal, mine bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c.removal != nil {
		return c.removal, false
	}
	if !c.going && (c.delivered || c.waiting > 0) {
		return nil, false
	}
	c.removal = &removal{done: make(chan struct{})}
	return c.removal, true
}

func (j *Joiner) release(c *creation, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.removal.err = err
	close(c.removal.done)
	c.removal = nil
}

func (j *Joiner) finish(identity string, c *creation, id string, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.id, c.err = id, err
	if err != nil && j.by[identity] == c {
		delete(j.by, identity)
	}
	close(c.done)
}

// Adopt enters an object that exists already: at start, from its record.
func (j *Joiner) Adopt(identity string, sum Fingerprint, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := &creation{sum: sum, done: make(chan struct{}), id: id, delivered: true}
	close(c.done)
	j.put(identity, c)
}

// Going says that the removal of the object with that ID has begun and can't be taken back:
// nobody will be told of it any more. Its identity is free after Forget.
func (j *Joiner) Going(identity, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c := j.made(identity, id); c != nil {
		c.going = true
	}
}

// Forget frees the identity when the object with that ID is removed.
func (j *Joiner) Forget(identity, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.made(identity, id) != nil {
		delete(j.by, identity)
	}
}

// made is the creation of the object with that identity and ID, nil if the identity is another
// object's, which may still be being made. It needs the lock.
func (j *Joiner) made(identity, id string) *creation {
	c := j.by[identity]
	if c == nil {
		return nil
	}
	select {
	case <-c.done:
		if c.id == id && c.err == nil {
			return c
		}
	default:
	}
	return nil
}
