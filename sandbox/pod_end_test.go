package sandbox

import (
	"errors"
	"sync/atomic"
	"testing"

	"berth/cni"
	"berth/sandbox/state"
)

// However often a pod is stopped while its disk takes nothing, one goroutine records it in the end.
func TestStopIsRecordedOnce(t *testing.T) {
	m, p, _ := aReadyPod(t)
	m.log = m.tasks.Log
	p.rec.Phase, p.rec.Network = state.PodStopped, &cni.Attachment{}
	var writes atomic.Int32
	m.podRecords.Note(func(string, string) func() { writes.Add(1); return func() {} })
	stops := func() {
		pass, err := m.tasks.Take(t.Context(), p.turn, "stop", p.String())
		if err != nil {
			t.Fatal(err)
		}
		defer pass()
		for range 10 {
			m.recordStopLater(p, errors.New("the disk is read-only"))
		}
	}
	for round := range int32(2) {
		stops()
		for writes.Load() == round { // until it is recorded
		}
	}
	m.tasks.Background.Close()
	if err := m.tasks.Background.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if n := writes.Load(); n != 2 {
		t.Errorf("it was recorded %d times, want 2", n)
	}
}
