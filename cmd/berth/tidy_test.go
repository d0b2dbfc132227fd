package main

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

func TestTidier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		released := 0
		tidier := newTidier(restTime, func() error { released++; return nil }, slog.New(slog.DiscardHandler))
		want := func(n int) {
			t.Helper()
			synctest.Wait()
			if released != n {
				t.Fatalf("memory was given back %d times, not %d", released, n)
			}
		}
		time.Sleep(10 * restTime)
		want(0) // nothing was changed
		for range 5 {
			tidier.changed()
			time.Sleep(restTime - 1)
			want(0) // and again in time
		}
		time.Sleep(1)
		want(1)
		time.Sleep(10 * restTime)
		want(1) // once is enough
		tidier.changed()
		time.Sleep(restTime)
		want(2)
		if err := tidier.Close(); err != nil {
			t.Error(err)
		}
		tidier.changed() // a late request
		want(2)
	})
}
