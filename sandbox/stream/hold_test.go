package stream

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(nil, nil, state.Node{}, Limits{Execs: 8, ExecsPerContainer: 8, Sessions: 8},
			task.NewRunner(testutil.Logger(t), nil))
		c := ContainerTarget{ID: "c"}
		ctx := t.Context()

		running, err := s.takeExec(ctx, c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Hold(ctx, "c", time.Second); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("Hold beside an exec = %v", err)
		}
		time.AfterFunc(time.Second/2, running)
		release, err := s.Hold(ctx, "c", time.Second)
		if err != nil {
			t.Fatalf("the end of the exec is not noticed: %v", err)
		}
		if _, err := s.Hold(ctx, "c", time.Second); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("second Hold = %v", err)
		}
		if err := s.holds.check(c.String()); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("exec with a client: %v", err)
		}
		// A probe waits, but not longer than its timeout.
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if _, err := s.takeExec(short, c); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("takeExec = %v", err)
		}
		time.AfterFunc(time.Minute, release)
		began := time.Now()
		running, err = s.takeExec(ctx, c)
		if err != nil || time.Since(began) != time.Minute {
			t.Errorf("takeExec = %v after %v", err, time.Since(began))
		}
		running()

		left, err := s.terminals.take(c.String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Hold(ctx, "c", time.Second); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("Hold beside a terminal = %v", err)
		}
		left()
		if release, err = s.Hold(ctx, "c", time.Second); err != nil {
			t.Fatal(err)
		}
		release()
	})
}
