package launcher

import (
	"runtime/debug"
	"testing"
	"time"

	"berth/shim/proto"
)

var garbage []byte

// An idle launcher releases the memory of earlier requests, and can still take the next request.
func TestIdleLauncherReleasesMemory(t *testing.T) {
	daemon, theirs, err := proto.ConnPair()
	if err != nil {
		t.Fatal(err)
	}
	defer daemon.Close()
	conn, err := proto.NewConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // as in a launcher
	for range 2 * keptGarbage >> 20 {
		garbage = make([]byte, 1<<20)
	}
	if !heapExceeds(keptGarbage) {
		t.Fatal("garbage is not seen")
	}
	received := make(chan error, 1)
	var request proto.Request
	go func() { _, err := (&launcher{conn: conn, served: true}).await(&request); received <- err }()
	for deadline := time.Now().Add(time.Minute); heapExceeds(keptGarbage); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it is kept")
		}
	}
	if err := daemon.Send(proto.Request{Kill: "exec"}); err != nil {
		t.Fatal(err)
	}
	if err := <-received; err != nil || request.Kill != "exec" {
		t.Errorf("received %+v, %v", request, err)
	}
}
