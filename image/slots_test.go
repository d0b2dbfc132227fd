package image_test

import (
	"context"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/image/pull"
	"berth/image/registry/registrytest"
)

// A registry that stops sending does not prevent pulls from other registries.
func TestSlowRegistryDoesNotStarveOthers(t *testing.T) {
	slow, other := registrytest.New(t), registrytest.New(t)
	s := openStore(t, pull.Config{MaxUnpacking: 2})
	held := gzipped(t, "f", "1")
	slow.PutImage("app", "v1", "", held)
	other.PutImage("app", "v1", "", gzipped(t, "f", "2"))
	gate := gateBlob(slow, held.Blob)
	holds, endHolding := context.WithCancel(t.Context())
	done := pullLater(holds, s, slow.Host()+"/app:v1")
	<-gate.arrived
	more := gzipped(t, "f", "3")
	slow.PutImage("more", "v1", "", more)
	queues, endQueuing := context.WithCancel(t.Context())
	waits := pullLater(queues, s, slow.Host()+"/more:v1")
	eventually(t, "both layers of the slow one are under way", downloading(s, 2))
	mustPull(t, s, other.Host()+"/app:v1")
	if n := slow.Count(digest.FromBytes(more.Blob).String()); n != 0 {
		t.Errorf("the slow registry was asked for another layer %d times", n)
	}
	// The waiting pull ends first. Otherwise the end of another pull would give it a turn, and it
	// could succeed.
	endQueuing()
	if err := <-waits; err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Errorf("the pull that waits for a turn ended with %v", err)
	}
	endHolding()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Errorf("the pull that holds a turn ended with %v", err)
	}
	close(gate.open)
}
