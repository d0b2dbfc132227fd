package harness

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Patience is how long a condition may take before the test gives it up. It is
// long because it only matters when something is wrong.
const Patience = 60 * time.Second

// Eventually waits until the condition returns nil.
func Eventually(t *testing.T, what string, condition func() error) {
	t.Helper()
	if err := WaitFor(condition); err != nil {
		t.Fatalf("%s: still not after %v: %v", what, Patience, err)
	}
}

// WaitFor returns nil as soon as the condition does, or its last error.
func WaitFor(condition func() error) error { return WaitUpTo(Patience, condition) }

func WaitUpTo(limit time.Duration, condition func() error) error {
	return PollUpTo(limit, 20*time.Millisecond, condition)
}

// PollUpTo is waitUpTo for conditions that are expensive to look at.
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

func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Get unpacks a result that must come without an error: get(f())(t).
func Get[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		Must(t, err)
		return value
	}
}

// Equal fails the test if got is not want.
func Equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// WantCode fails the test unless err carries the gRPC code and its text all the parts.
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

// WantOnce checks that an error mentions something, and does not repeat itself.
func WantOnce(t *testing.T, err error, part string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if n := strings.Count(err.Error(), part); n != 1 {
		t.Errorf("the error mentions %q %d times: %v", part, n, err)
	}
}

// CodeOf returns the gRPC code of an answer: OK without an error.
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

func Unexpected(what string, got, want any) error {
	return fmt.Errorf("%s is %v, want %v", what, got, want)
}
