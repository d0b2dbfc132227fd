package cli

import (
	"testing"
	"time"
)

func TestBytes(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_960: "1.0 MB", 1 << 63: "9.2 EB"} {
		if got := Bytes(n); got != want {
			t.Errorf("size of %d: %q, want %q", n, got, want)
		}
	}
}

func TestAge(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", time.Minute: "1m", 119 * time.Minute: "1h", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := Age(now, now.Add(-d)); got != want {
			t.Errorf("age of %s: %q, want %q", d, got, want)
		}
	}
}
