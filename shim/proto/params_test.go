package proto

import (
	"slices"
	"testing"
)

func TestFDs(t *testing.T) {
	p := MonitorParams{Init: -1, Listen: 3, Log: -1, Stdin: -1, Stdout: 5, Stderr: 6, Console: -1, Verdict: -1, OOM: -1, OOMNotify: -1, OOMParent: -1, Gate: -1}
	if got := p.FDs(); !slices.Equal(got, []int{3, 5, 6}) {
		t.Errorf("FDs = %v", got)
	}
}
