package launcher

import (
	"runtime"
	"slices"
	"testing"

	"github.com/moby/sys/capability"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/testutil"
	"berth/shim/proto"
)

// bounds returns which capabilities CRIU could have for a container with these ones.
func bounds(t *testing.T, given *specs.LinuxCapabilities) map[capability.Cap]bool {
	t.Helper()
	spec := &specs.Spec{Process: &specs.Process{Capabilities: given}}
	b := &restoreBackend{libcontainerBackend: libcontainerBackend{launch: &launch{Launch: &proto.Launch{Spec: spec}}}}
	found := map[capability.Cap]bool{}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends
		err := b.dropRights()
		for _, c := range capability.ListKnown() {
			if has, known := capability.GetBound(c); known == nil {
				found[c] = has
			}
		}
		done <- err
	}()
	testutil.Must(t, <-done)
	return found
}

// CRIU has the capabilities of the container and those for a restore, and no other.
func TestDropRights(t *testing.T) {
	before := bounds(t, nil)
	for c, has := range bounds(t, &specs.LinuxCapabilities{Bounding: []string{"CAP_AUDIT_WRITE"}}) {
		want := before[c] && (c == capability.CAP_AUDIT_WRITE || slices.Contains(restoringRights, c))
		if has != want {
			t.Errorf("%v: %v, want %v", c, has, want)
		}
	}
	if after := bounds(t, nil); !after[capability.CAP_SYS_ADMIN] || after[capability.CAP_SYS_MODULE] != before[capability.CAP_SYS_MODULE] {
		t.Errorf("another thread has %v, had %v", after, before)
	}
}
