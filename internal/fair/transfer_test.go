package fair

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const testRate = 8 << 10

// The time that the reader takes between two reads is not the sender's.
func TestWindowCountsWaitingOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		in, out := io.Pipe()
		context.AfterFunc(ctx, func() { in.CloseWithError(ctx.Err()) }) // as net/http does
		body := NewBody(ctx, cancel, in, Meter{Window: time.Minute, Rate: testRate})
		go func() {
			for range 3 {
				time.Sleep(50 * time.Second)
				_, _ = out.Write(make([]byte, 60*testRate))
			}
		}()
		for range 3 {
			if _, err := body.Read(make([]byte, 60*testRate)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Hour)
		}
		began := time.Now()
		_, err := body.Read(make([]byte, 1))
		if !errors.Is(err, ErrStalled) || time.Since(began) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// A byte now and then does not keep a transfer going.
func TestSlowTransferStalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		in, out := io.Pipe()
		var sender sync.WaitGroup
		defer sender.Wait() // the bubble's time stands still once this function has returned
		sender.Go(func() {
			for ctx.Err() == nil {
				time.Sleep(time.Second)
				_, _ = out.Write([]byte("x"))
			}
		})
		began := time.Now()
		_, err := io.ReadAll(NewBody(ctx, cancel, in, Meter{Window: time.Minute, Rate: testRate}))
		if !errors.Is(err, ErrStalled) || time.Since(began) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		in.Close()
	})
}
