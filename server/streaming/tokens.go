package streaming

import (
	"crypto/rand"
	"sync"
	"time"

	"berth/internal/coded"
	"berth/server/sessions/wire"
)

const (
	// tokenTime is how long a URL is valid, as in cri-streaming's server.
	tokenTime = time.Minute
	// maxTokens bounds the unused URLs.
	maxTokens = 1000
)

// tokens are the sessions that have not started. The zero value is empty. The lock is
// held for map operations only.
type tokens struct {
	mu sync.Mutex
	// +checklocks:mu
	waiting map[string]offer
}

type offer struct {
	session wire.Session
	expires time.Time
	claimed bool // a connection has shown the token
}

// add returns a new token, or ResourceExhausted if too many are unused.
func (t *tokens) add(session wire.Session) (string, error) {
	token := rand.Text() // 128 bits
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting == nil {
		t.waiting = map[string]offer{}
	}
	t.dropExpired(now)
	if len(t.waiting) >= maxTokens {
		return "", coded.Errorf(coded.ResourceExhausted, "%s: %d URLs of sessions are unused, the limit is reached",
			session.Kind, maxTokens)
	}
	t.waiting[token] = offer{session: session, expires: now.Add(tokenTime)}
	return token, nil
}

// take removes a token and returns its session.
func (t *tokens) take(kind, token string) (wire.Session, bool) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	o, ok := t.waiting[token]
	if !ok {
		return wire.Session{}, false
	}
	delete(t.waiting, token)
	return o.session, o.session.Kind == kind && now.Before(o.expires)
}

// claim reports whether a token is valid and was not claimed before. Only the first connection with
// a token is preferred.
func (t *tokens) claim(kind, token string) bool {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	o, ok := t.waiting[token]
	if !ok || o.session.Kind != kind || o.claimed || !now.Before(o.expires) {
		return false
	}
	o.claimed = true
	t.waiting[token] = o
	return true
}

// outstanding reports whether a token is unused and valid.
func (t *tokens) outstanding(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range t.waiting {
		if now.Before(o.expires) {
			return true
		}
	}
	return false
}

// dropExpired removes expired tokens.
//
// +checklocks:t.mu
func (t *tokens) dropExpired(now time.Time) {
	for token, o := range t.waiting {
		if !now.Before(o.expires) {
			delete(t.waiting, token)
		}
	}
}

// takeAll removes and returns the unused tokens that no connection has shown.
func (t *tokens) takeAll() (all []wire.Token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dropExpired(time.Now())
	for token, o := range t.waiting {
		if !o.claimed {
			all = append(all, wire.Token{Token: token, Session: o.session, Expires: o.expires})
			delete(t.waiting, token)
		}
	}
	return all
}

// restore adds the tokens of an earlier process.
func (t *tokens) restore(all []wire.Token) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waiting = map[string]offer{}
	for _, x := range all {
		t.waiting[x.Token] = offer{session: x.Session, expires: x.Expires}
	}
}
