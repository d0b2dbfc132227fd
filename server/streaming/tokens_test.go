package streaming

import (
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/server/sessions/wire"
)

func TestTokenWorksOnceForItsKind(t *testing.T) {
	t.Parallel()
	var all tokens
	token, err := all.add(wire.Session{Kind: wire.Exec})
	testutil.Must(t, err)
	if _, ok := all.take("exec", "another"); ok {
		t.Error("an unknown token is valid")
	}
	if _, ok := all.take("exec", token); !ok {
		t.Error("the token is invalid")
	}
	if _, ok := all.take("exec", token); ok {
		t.Error("the token is valid twice")
	}
	token, err = all.add(wire.Session{Kind: wire.Exec})
	testutil.Must(t, err)
	if _, ok := all.take("attach", token); ok {
		t.Error("the token is valid for another kind of session")
	}
	if _, ok := all.take("exec", token); ok {
		t.Error("the token is valid after an attempt with another kind")
	}
}

func TestTokensExpireAndAreLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all tokens
		var last string
		for range maxTokens {
			var err error
			last, err = all.add(wire.Session{Kind: wire.Exec})
			testutil.Must(t, err)
		}
		if _, err := all.add(wire.Session{Kind: wire.Exec}); errdefs.Code(err) != codes.ResourceExhausted {
			t.Errorf("beyond the limit: %v", err)
		}
		time.Sleep(tokenTime)
		if _, ok := all.take("exec", last); ok {
			t.Error("an expired token is valid")
		}
		if _, err := all.add(wire.Session{Kind: wire.Exec}); err != nil {
			t.Errorf("expired tokens count: %v", err)
		}
		if len(all.waiting) != 1 {
			t.Errorf("%d tokens are kept, want 1", len(all.waiting))
		}
	})
}
