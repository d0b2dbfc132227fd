package launcher

import (
	"testing"

	"github.com/opencontainers/runc/libcontainer"
)

// If libcontainer has another field, inits are moved into their cgroups, which takes longer.
func TestManagerOf(t *testing.T) {
	field := managerOf(new(libcontainer.Container))
	if !field.IsValid() || !field.CanSet() {
		t.Error("libcontainer's container has no field for its cgroup")
	}
}
