package sandbox

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"

	"berth/internal/errdefs"
)

// fingerprint tells whether two requests are the same.
type fingerprint [sha256.Size]byte

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

// creation is one object being made, or made.
type creation struct {
	sum  fingerprint
	done chan struct{} // closed when id and err are final
	id   string
	err  error
}

// joiner makes creating idempotent: for each identity there is at most one
// creation, which later calls with the same content join. Its lock guards the
// map and is held for map operations only.
type joiner struct {
	mu sync.Mutex
	by map[string]*creation
}

// create returns the ID of the object of that identity: of the existing one, of
// the one being made, or of the one that make makes. Another content than the
// existing object's is AlreadyExists. A creation that failed leaves no trace.
func (j *joiner) create(ctx context.Context, identity string, sum fingerprint, start func(finish func(id string, err error)) bool) (string, error) {
	c, mine := j.entry(identity, sum)
	if c.sum != sum {
		return "", errdefs.AlreadyExists("%s exists (%s) with another configuration", identity, c.id)
	}
	if mine {
		ok := start(func(id string, err error) { j.finish(identity, c, id, err) })
		if !ok {
			j.finish(identity, c, "", errdefs.Unavailable("create %s: berth is stopping", identity))
		}
	}
	select {
	case <-c.done:
		return c.id, c.err
	case <-ctx.Done():
		return "", fmt.Errorf("create %s: goes on without its caller: %w", identity, ctx.Err())
	}
}

func (j *joiner) entry(identity string, sum fingerprint) (c *creation, mine bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c := j.by[identity]; c != nil {
		return c, false
	}
	c = &creation{sum: sum, done: make(chan struct{})}
	j.put(identity, c)
	return c, true
}

func (j *joiner) put(identity string, c *creation) {
	if j.by == nil {
		j.by = map[string]*creation{}
	}
	j.by[identity] = c
}

func (j *joiner) finish(identity string, c *creation, id string, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c.id, c.err = id, err
	if err != nil && j.by[identity] == c {
		delete(j.by, identity)
	}
	close(c.done)
}

// adopt enters an object that exists already: at start, from its record.
func (j *joiner) adopt(identity string, sum fingerprint, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := &creation{sum: sum, done: make(chan struct{}), id: id}
	close(c.done)
	j.put(identity, c)
}

// forget frees the identity when the object with that ID is removed.
func (j *joiner) forget(identity, id string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c := j.by[identity]; c != nil && c.id == id {
		delete(j.by, identity)
	}
}
