package criu

import (
	"path/filepath"
	"testing"
)

// The cgroup of a CRIU that has ended may be removed already.
func TestAbortWithoutCgroup(t *testing.T) {
	if err := Abort(filepath.Join(t.TempDir(), "missing")); err != nil {
		t.Error(err)
	}
}
