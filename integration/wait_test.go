package integration

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// patience is how long a condition may take before the test gives it up. It is
// long because it only matters when something is wrong.
const patience = 30 * time.Second

// eventually waits until the condition returns nil.
func eventually(t *testing.T, what string, condition func() error) {
	t.Helper()
	if err := waitFor(condition); err != nil {
		t.Fatalf("%s: still not after %v: %v", what, patience, err)
	}
}

// waitFor returns nil as soon as the condition does, or its last error.
func waitFor(condition func() error) error { return waitUpTo(patience, condition) }

func waitUpTo(limit time.Duration, condition func() error) error {
	return pollUpTo(limit, 20*time.Millisecond, condition)
}

// pollUpTo is waitUpTo for conditions that are expensive to look at.
func pollUpTo(limit, pause time.Duration, condition func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := condition()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// get unpacks a result that must come without an error: get(f())(t).
func get[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must(t, err)
		return value
	}
}

// equal fails the test if got is not want.
func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// wantCode fails the test unless err carries the gRPC code and its text all the parts.
func wantCode(t *testing.T, err error, code codes.Code, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %s", code)
	}
	if got := codeOf(err); got != code {
		t.Errorf("gRPC code is %s, want %s: %v", got, code, err)
	}
	for _, part := range parts {
		if !contains(err.Error(), part) {
			t.Errorf("the error does not mention %q: %v", part, err)
		}
	}
}

func codeOf(err error) codes.Code {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Code()
	}
	return codes.Unknown
}

func unexpected(what string, got, want any) error {
	return fmt.Errorf("%s is %v, want %v", what, got, want)
}
