package sandbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"berth/internal/errdefs"
)

// fingerprint identifies the content of a request.
type fingerprint [sha256.Size]byte

// fingerprintOf returns the fingerprint of a request, from its deterministic encoding.
func fingerprintOf(messages ...proto.Message) (fingerprint, error) {
	h := sha256.New()
	for _, msg := range messages {
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(msg)
		if err != nil {
			return fingerprint{}, errdefs.InvalidArgument("encode request: %w", err)
		}
		fmt.Fprintf(h, "%d:", len(data))
		h.Write(data)
	}
	return fingerprint(h.Sum(nil)), nil
}

// creation is one object that exists or is being created.
type creation struct {
	sum  fingerprint
	done chan struct{} // closed when id and err are final
	id   string
	err  error

	// Guarded by the lock of creations:
	waiting   int      // callers that will receive the ID
	delivered bool     // a caller has received the ID
	going     bool     // the removal has started and cannot be undone
	removal   *removal // the running removal for a caller that replaces the object, or nil
}

// removal is one attempt to remove an object for a caller that replaces it.
type removal struct {
	done chan struct{} // closed when err is final
	err  error
}

// errInUse is the error of maker.Remove for an object in use.
var errInUse = errors.New("in use")

// creations makes the creation of objects idempotent: it creates at most one object for each
// identity. A call that repeats a running request waits for its result. A later call with the same
// content gets the existing object.
//
// A call with other content gets AlreadyExists, unless no caller has received the ID and the object
// is unused. In that case the first caller has given up and is retrying, so the object is removed
// and created again. kubelet never repeats exactly the same request for a container, because it
// chooses a new path for the termination log each time.
//
// No caller receives the ID of an object whose removal has started (Going). A caller waits until
// the object is removed, and gets a new one.
//
// The lock guards the map and the creations' fields. It is held only to access them.
type creations struct {
	mu sync.Mutex
	// +checklocks:mu
	by map[string]*creation
}

// maker creates and removes objects of one kind.
type maker struct {
	// Spawn starts a goroutine, or returns false if the manager is closing.
	Spawn func(func()) bool
	// Make creates the object.
	Make func() (id string, err error)
	// Remove removes an object whose ID no caller has received, or continues a removal that has
	// started. It returns when the object is gone. It returns errInUse and removes nothing if a
	// client found the object by other means and uses it. Once Remove has decided to remove the
	// object, no client can start to use it.
	Remove func(ctx context.Context, id string) error
}

// Create returns the ID of the object with that identity. It waits for a running creation, and
// creates a missing object. A failed creation removes everything that it has made. Errors do not
// name the identity, because the caller adds it.
func (j *creations) Create(ctx context.Context, identity string, sum fingerprint, mk maker) (string, error) {
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
				continue // the failed creation has removed everything
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
		case !errors.Is(going.err, errInUse):
			return "", fmt.Errorf("replace %s: %w", c.id, going.err)
		case c.sum != sum:
			return "", inUse(c)
		}
	}
}

func inUse(c *creation) error {
	return errdefs.AlreadyExists("%s exists with another configuration", c.id)
}

func waitDone(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for an earlier request: %w", ctx.Err())
	}
}

// replace starts to remove an object whose ID no caller has received, or continues a removal that
// has started. It returns nil in other cases. The removal outlives its caller. If the removal
// fails, the object stays, and the next caller retries.
func (j *creations) replace(c *creation, mk maker) *removal {
	going, mine := j.claim(c)
	if !mine {
		return going
	}
	if !mk.Spawn(func() { j.release(c, mk.Remove(context.Background(), c.id)) }) { // the operation sets a limit
		j.release(c, errdefs.Unavailable("berth is stopping"))
	}
	return going
}

// enter returns the creation with an identity. If there is none, it adds one and sets mine. joined
// reports that the caller is counted as waiting for the ID. going is the running removal of the
// object, or nil.
func (j *creations) enter(identity string, sum fingerprint) (c *creation, mine, joined bool, going *removal) {
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

// put adds a creation. The caller holds the lock.
//
// +checklocks:j.mu
func (j *creations) put(identity string, c *creation) {
	if j.by == nil {
		j.by = map[string]*creation{}
	}
	j.by[identity] = c
}

func (j *creations) await(ctx context.Context, c *creation) (string, error) {
	delivered := false
	defer func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		c.waiting--
		c.delivered = c.delivered || delivered
	}()
	select {
	case <-c.done:
		delivered = c.err == nil && ctx.Err() == nil
		return c.id, c.err
	case <-ctx.Done():
		return "", fmt.Errorf("continues in the background: %w", ctx.Err())
	}
}

// claim marks the object as being removed, if its removal has started or no caller has received its
// ID. mine reports that this caller must remove it. If another caller was faster, claim returns the
// removal of that caller. In other cases it returns nil.
func (j *creations) claim(c *creation) (going *removal, mine bool) {
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

func (j *creations) release(c *creation, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.removal.err = err
	close(c.removal.done)
	c.removal = nil
}

func (j *creations) finish(identity string, c *creation, id string, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.id, c.err = id, err
	if err != nil && j.by[identity] == c {
		delete(j.by, identity)
	}
	close(c.done)
}

// Adopt adds an object that a record describes, when the daemon starts.
func (j *creations) Adopt(identity string, sum fingerprint, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := &creation{sum: sum, done: make(chan struct{}), id: id, delivered: true}
	close(c.done)
	j.put(identity, c)
}

// Going records that the removal of the object with that ID has started and cannot be undone. No
// caller receives the ID any more. The identity is free after Forget.
func (j *creations) Going(identity, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c := j.made(identity, id); c != nil {
		c.going = true
	}
}

// Forget frees the identity after the removal of the object with that ID.
func (j *creations) Forget(identity, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.made(identity, id) != nil {
		delete(j.by, identity)
	}
}

// made returns the creation of the object with that identity and ID. It returns nil if the identity
// belongs to another object, which may still be in creation. The caller holds the lock.
//
// +checklocks:j.mu
func (j *creations) made(identity, id string) *creation {
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
