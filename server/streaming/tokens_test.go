package streaming

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func nothing(http.ResponseWriter, *http.Request) {}

func TestTokenWorksOnceForItsKind(t *testing.T) {
	t.Parallel()
	var all tokens
	token, err := all.add("exec", nothing)
	testutil.Must(t, err)
	if _, ok := all.take("exec", "another"); ok {
		t.Error("a token that was not given out is good")
	}
	if _, ok := all.take("exec", token); !ok {
		t.Error("the token is not good")
	}
	if _, ok := all.take("exec", token); ok {
		t.Error("the token is good twice")
	}
	if token, err = all.add("exec", nothing); err != nil {
		t.Fatal(err)
	}
	if _, ok := all.take("attach", token); ok {
		t.Error("the token is good for another kind of session")
	}
	if _, ok := all.take("exec", token); ok {
		t.Error("a token that was tried out is still good")
	}
}

func TestTokensExpireAndAreLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all tokens
		var last string
		for range maxTokens {
			var err error
			if last, err = all.add("exec", nothing); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := all.add("exec", nothing); errdefs.Code(err) != codes.ResourceExhausted {
			t.Errorf("one too many: %v", err)
		}
		time.Sleep(tokenTime)
		if _, ok := all.take("exec", last); ok {
			t.Error("an expired token is good")
		}
		if _, err := all.add("exec", nothing); err != nil {
			t.Errorf("expired ones count: %v", err)
		}
		if len(all.waiting) != 1 {
			t.Errorf("%d tokens are kept, want 1", len(all.waiting))
		}
	})
}
