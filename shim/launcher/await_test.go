package launcher

import (
	"runtime"
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
	heap := func() uint64 {
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	const released = 16 << 20
	for range 2 * released >> 20 {
		garbage = make([]byte, 1<<20)
	}
	received := make(chan error, 1)
	var request proto.Request
	go func() { _, err := (&launcher{conn: conn, served: keptRequests}).await(&request); received <- err }()
	for deadline := time.Now().Add(time.Minute); heap() > released; time.Sleep(10 * time.Millisecond) {
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
