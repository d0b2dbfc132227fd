package streaming

import (
	"crypto/rand"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
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
	kind    string // path element of the URL
	serve   http.HandlerFunc
	expires time.Time
	claimed bool // a connection has shown the token
}

// add returns a new token, or ResourceExhausted if too many are unused.
func (t *tokens) add(kind string, serve http.HandlerFunc) (string, error) {
	token := rand.Text() // 128 bits
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting == nil {
		t.waiting = map[string]offer{}
	}
	t.dropExpired(now)
	if len(t.waiting) >= maxTokens {
		return "", errdefs.New(codes.ResourceExhausted, "%s: %d URLs of sessions are unused, the limit is reached",
			kind, maxTokens)
	}
	t.waiting[token] = offer{kind: kind, serve: serve, expires: now.Add(tokenTime)}
	return token, nil
}

// take removes a token and returns its handler.
func (t *tokens) take(kind, token string) (http.HandlerFunc, bool) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	o, ok := t.waiting[token]
	if !ok {
		return nil, false
	}
	delete(t.waiting, token)
	return o.serve, o.kind == kind && now.Before(o.expires)
}

// claim reports whether a token is valid and was not claimed before. Only the first connection with
// a token is preferred.
func (t *tokens) claim(kind, token string) bool {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	o, ok := t.waiting[token]
	if !ok || o.kind != kind || o.claimed || !now.Before(o.expires) {
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
