// Package join makes creating things idempotent: who asks again while the first
// request is under way joins it, and who asks afterwards gets what was made.
package join

import (
	"context"
	"crypto/sha256"
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
	removal   *removal // not nil: it is being removed
}

// removal is the end of an object that nobody was told of.
type removal struct {
	done chan struct{} // closed when err is final
	err  error
}

// Joiner makes creating idempotent: for each identity there is at most one
// creation, which later calls with the same content join.
//
// A call with another content gets AlreadyExists, unless nobody was ever told of
// the object and nobody uses it: then its caller has given up, and asks again.
// (kubelet never sends the same container twice: the path of the termination log is
// made up anew for each request.) Such an object is removed and made anew.
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
	// Unused tells whether nobody has found the object by other means and uses it.
	Unused func(id string) bool
	// Remove takes away an object that nobody was told of.
	Remove func(ctx context.Context, id string) error
}

// Create returns the ID of the object of that identity: of the existing one, of
// the one being made, or of the one that it makes. A creation that failed leaves
// no trace. Errors do not name the identity: the caller does.
func (j *Joiner) Create(ctx context.Context, identity string, sum Fingerprint, mk Maker) (string, error) {
	for {
		c, mine, going := j.enter(identity, sum)
		if mine && !mk.Spawn(func() { id, err := mk.Make(); j.finish(identity, c, id, err) }) {
			j.finish(identity, c, "", errdefs.Unavailable("berth is stopping"))
		}
		if going == nil && c.sum == sum {
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
				return "", errdefs.AlreadyExists("it exists (%s) with another configuration", c.id)
			}
		}
		if err := waitDone(ctx, going.done); err != nil {
			return "", err
		}
		if going.err != nil {
			return "", fmt.Errorf("replace %s, which nobody was told of: %w", c.id, going.err)
		}
	}
}

func waitDone(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for an earlier request to end: %w", ctx.Err())
	}
}

// replace begins to remove an object that nobody was told of and nobody uses; nil
// if that is not so. It goes on without its caller; if it fails the object stays, to be
// replaced by the next who asks.
func (j *Joiner) replace(c *creation, mk Maker) *removal {
	if !mk.Unused(c.id) {
		return nil
	}
	going := j.claim(c)
	if going == nil {
		return nil
	}
	if !mk.Spawn(func() { j.release(c, mk.Remove(context.Background(), c.id)) }) { // the operation has its own limit
		j.release(c, errdefs.Unavailable("berth is stopping"))
	}
	return going
}

// enter returns the creation of that identity, a new one if there is none, and
// counts the caller in if it is to be told the ID. One that is being removed it
// returns with what to wait for.
func (j *Joiner) enter(identity string, sum Fingerprint) (c *creation, mine bool, going *removal) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c = j.by[identity]
	if c == nil {
		c, mine = &creation{sum: sum, done: make(chan struct{})}, true
		j.put(identity, c)
	}
	if c.removal != nil {
		return c, false, c.removal
	}
	if c.sum == sum {
		c.waiting++
	}
	return c, mine, nil
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

// claim marks the object as being removed, if nobody knows of it; else it returns nil.
func (j *Joiner) claim(c *creation) *removal {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c.delivered || c.waiting > 0 || c.removal != nil {
		return nil
	}
	c.removal = &removal{done: make(chan struct{})}
	return c.removal
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

// Forget frees the identity when the object with that ID is removed.
func (j *Joiner) Forget(identity, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := j.by[identity]
	if c == nil {
		return
	}
	select {
	case <-c.done:
		if c.id == id {
			delete(j.by, identity)
		}
	default: // being made: another object
	}
}
