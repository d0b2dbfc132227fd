package main

import "testing"

func TestStolenCPUTime(t *testing.T) {
	const later = "cpu  3743825 693213 3230081 3376676 66509 0 32883 102473 0 0\ncpu0 1 2 3\n"
	now, err := parseProcessors(later)
	if err != nil {
		t.Fatal(err)
	}
	then := processors{busy: now.busy - 300, stolen: now.stolen - 100}
	if got := now.stolenSince(then); got != 0.25 {
		t.Errorf("got %v, want a quarter", got)
	}
	if got := now.stolenSince(now); got != 0 {
		t.Errorf("of no time: got %v", got)
	}
	if _, err := parseProcessors("intr 1 2 3"); err == nil {
		t.Error("a text without processors was accepted")
	}
}
