package lazy

import (
	"fmt"
	"testing"
	"time"
)

func TestRates(t *testing.T) {
	const mib = 1 << 20
	var r rates
	if got := r.estimate("a", mib); got != 0 {
		t.Errorf("an unknown registry: %v", got)
	}
	r.observe("a", mib, time.Millisecond) // too small to show anything
	r.observe("a", 100*mib, 0)
	if got := r.estimate("a", mib); got != 0 {
		t.Errorf("after pulls that show nothing: %v", got)
	}
	r.observe("a", 100*mib, 10*time.Second)
	if got := r.estimate("a", 50*mib); got != 5*time.Second {
		t.Errorf("after a pull: %v", got)
	}
	r.observe("a", 300*mib, 10*time.Second) // 10 and 30 MiB/s
	if got := r.estimate("a", 50*mib); got != 2500*time.Millisecond {
		t.Errorf("after two pulls: %v", got)
	}
	if got := r.estimate("b", 50*mib); got != 0 {
		t.Errorf("another registry: %v", got)
	}
	for i := range 2 * maxRates {
		r.observe(fmt.Sprint(i), 100*mib, time.Second)
	}
	if len(r.byHost) != maxRates {
		t.Errorf("%d registries are kept", len(r.byHost))
	}
}
