package main

import (
	"testing"
	"time"
)

func TestLongestGap(t *testing.T) {
	const lines = "1000000 0\n2000000 9000\n3000000 5000\n4000000 7000\n5000000 99"
	for _, tc := range []struct {
		name  string
		after int64 // µs
		want  gap
		found bool
	}{
		{"of all", 0, gap{time.UnixMicro(2000000), 9 * time.Millisecond}, true},
		{"of the later ones", 2000000, gap{time.UnixMicro(4000000), 7 * time.Millisecond}, true},
		{"not of half a line", 4000000, gap{}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, found := longestGap(lines, time.UnixMicro(tc.after))
			if got != tc.want || found != tc.found {
				t.Errorf("got %v, %v", got, found)
			}
		})
	}
}
