package harness

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/internal/testutil"
)

// Patience limits how long tests wait for a condition. It is long because only a failing test waits
// for the whole time.
const Patience = 60 * time.Second

// Eventually waits until the condition returns nil. If the condition does not hold within Patience,
// it ends the test with the text what and the last error.
func Eventually(t *testing.T, what string, condition func() error) {
	t.Helper()
	if err := WaitFor(condition); err != nil {
		t.Fatalf("not within %v: %s: %v", Patience, what, err)
	}
}

// EventuallyTrue is Eventually with a condition that has no error.
func EventuallyTrue(t *testing.T, what string, condition func() bool) {
	t.Helper()
	EventuallyGot(t, what, func() (bool, any) { return condition(), false })
}

// EventuallyGot is Eventually with a condition that returns the observed value, for the failure
// text.
func EventuallyGot(t *testing.T, what string, condition func() (ok bool, got any)) {
	t.Helper()
	Eventually(t, what, func() error {
		if ok, got := condition(); !ok {
			return fmt.Errorf("got %v", got)
		}
		return nil
	})
}

// WaitFor waits up to Patience until the condition returns nil. It returns the last error.
func WaitFor(condition func() error) error { return WaitUpTo(Patience, condition) }

// WaitUpTo is WaitFor with another time limit.
func WaitUpTo(limit time.Duration, condition func() error) error {
	return PollUpTo(limit, 20*time.Millisecond, condition)
}

// PollUpTo is WaitUpTo for expensive conditions. It pauses between two calls of the condition.
func PollUpTo(limit, pause time.Duration, condition func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := condition()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
	}
}

// Go runs f in a goroutine and returns a channel with its result.
func Go(f func() error) <-chan error {
	result := make(chan error, 1)
	go func() { result <- f() }()
	return result
}

// Must ends the test if err is not nil.
func Must(t *testing.T, err error) {
	t.Helper()
	testutil.Must(t, err)
}

// Get returns the value of a call, and ends the test if the call failed: Get(f())(t).
func Get[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		Must(t, err)
		return value
	}
}

// Equal fails the test if got differs from want.
func Equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// WantText fails the test for each part that the text lacks.
func WantText(t *testing.T, what, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%s: no %q in %q", what, part, text)
		}
	}
}

// WantNoText fails the test for each part that the text contains.
func WantNoText(t *testing.T, what, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if strings.Contains(text, part) {
			t.Errorf("%s: %q in %q", what, part, text)
		}
	}
}

// WantCode fails the test unless err carries the gRPC code and its text contains all the parts.
func WantCode(t *testing.T, err error, code codes.Code, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %s", code)
	}
	if got := CodeOf(err); got != code {
		t.Errorf("gRPC code is %s, want %s: %v", got, code, err)
	}
	for _, part := range parts {
		if !Contains(err.Error(), part) {
			t.Errorf("the error does not mention %q: %v", part, err)
		}
	}
}

// WantOnce fails the test unless the error's text contains part exactly once.
func WantOnce(t *testing.T, err error, part string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one that mentions %q", part)
	}
	if n := strings.Count(err.Error(), part); n != 1 {
		t.Errorf("the error mentions %q %d times, want once: %v", part, n, err)
	}
}

// CodeOf returns the gRPC code of an error, and OK if err is nil.
func CodeOf(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Code()
	}
	return codes.Unknown
}

// Unexpected returns an error with the name of a value, the value and its expected value.
func Unexpected(what string, got, want any) error {
	return fmt.Errorf("%s is %v, want %v", what, got, want)
}
