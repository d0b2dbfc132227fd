package memory

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

const restTime = 3 * time.Second

// countReleases runs test with a trimmer, and a function that checks how often memory was released.
func countReleases(t *testing.T, test func(t *testing.T, trimmer *IdleTrimmer, want func(n int64))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var released atomic.Int64
		trimmer := NewIdleTrimmer(restTime, func() error { released.Add(1); return nil }, slog.New(slog.DiscardHandler))
		test(t, trimmer, func(n int64) {
			t.Helper()
			synctest.Wait()
			if released.Load() != n {
				t.Fatalf("memory was released %d times, want %d", released.Load(), n)
			}
		})
		if err := trimmer.Close(); err != nil {
			t.Error(err)
		}
		trimmer.Changing()() // a late request
	})
}

func TestMemoryIsReleasedOnceAfterStart(t *testing.T) {
	countReleases(t, func(_ *testing.T, _ *IdleTrimmer, want func(int64)) {
		time.Sleep(restTime - 1)
		want(0)
		time.Sleep(10 * restTime)
		want(1)
	})
}

func TestMemoryIsReleasedWhenChangesRest(t *testing.T) {
	countReleases(t, func(_ *testing.T, trimmer *IdleTrimmer, want func(int64)) {
		for range 5 {
			trimmer.Changing()()
			time.Sleep(restTime - 1)
			want(0)
		}
		time.Sleep(time.Nanosecond)
		want(1)
		time.Sleep(10 * restTime)
		want(1)
		trimmer.Changing()()
		time.Sleep(restTime)
		want(2)
	})
}

func TestLongChangeDelaysReleaseForLimitedTime(t *testing.T) {
	countReleases(t, func(_ *testing.T, trimmer *IdleTrimmer, want func(int64)) {
		long, short := trimmer.Changing(), trimmer.Changing()
		short()
		time.Sleep(maxChange - 1)
		want(0)
		time.Sleep(time.Nanosecond)
		want(1)
		time.Sleep(10 * maxChange)
		want(1)
		trimmer.Changing()() // the long change does not delay the release after this one
		time.Sleep(restTime)
		want(2)
		trimmer.Changing()
		time.Sleep(maxChange)
		want(3)
		long()
		time.Sleep(restTime)
		want(4)
	})
}
