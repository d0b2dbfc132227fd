package sandbox

import (
	"os"
	"testing"

	"berth/cni"
	"berth/sandbox/state"
)

// A stop that cannot be recorded is recorded in the background, as soon as the disk accepts it.
func TestStopIsRecordedLater(t *testing.T) {
	m, p, records := aReadyPod(t)
	m.log = m.tasks.Log
	if err := p.unshared().Move(state.PodStopping); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(records, records+".away"); err != nil { // nothing can be written there
		t.Fatal(err)
	}
	status := p.unshared()
	status.Network = &cni.Attachment{} // it was not detached
	err := m.records.WritePod(p.PodSpec, status.PodStatus)
	if err == nil {
		t.Fatal("a record was written to a folder that does not exist")
	}
	if err := os.Rename(records+".away", records); err != nil {
		t.Fatal(err)
	}
	m.recordStopLater(status, err)
	m.tasks.Background.Close()
	if err := m.tasks.Background.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(records); err != nil || len(entries) != 1 {
		t.Errorf("records: %v, %v", entries, err)
	}
}
