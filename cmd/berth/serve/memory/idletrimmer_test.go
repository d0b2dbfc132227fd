package memory

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const restTime = 3 * time.Second

func TestIdleTrimmer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var released atomic.Int64
		tidier := NewIdleTrimmer(restTime, func() error { released.Add(1); return nil }, slog.New(slog.DiscardHandler))
		want := func(n int64) {
			t.Helper()
			synctest.Wait()
			if released.Load() != n {
				t.Fatalf("memory was given back %d times, not %d", released.Load(), n)
			}
		}
		time.Sleep(restTime - 1)
		want(0)
		time.Sleep(10 * restTime)
		want(1) // what starting needed
		for range 5 {
			tidier.Changing()()
			time.Sleep(restTime - 1)
			want(1) // and again in time
		}
		time.Sleep(1)
		want(2)
		time.Sleep(10 * restTime)
		want(2) // once is enough
		tidier.Changing()()
		time.Sleep(restTime)
		want(3)
		long, short := tidier.Changing(), tidier.Changing()
		short()
		time.Sleep(waits - 1)
		want(3) // a change takes long
		time.Sleep(1)
		want(4) // too long
		time.Sleep(10 * waits)
		want(4)
		tidier.Changing()()
		time.Sleep(restTime)
		want(5) // what it waits for is nothing to the others
		tidier.Changing()
		time.Sleep(waits)
		want(6) // what began after memory was given back
		long()
		time.Sleep(restTime)
		want(7)
		if err := tidier.Close(); err != nil {
			t.Error(err)
		}
		tidier.Changing()() // a late request
		want(7)
	})
}
