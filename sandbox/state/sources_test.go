package state

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

// Nothing is made for a container that was given up while a look at a volume hung.
func TestMakeSourcesInTime(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "a", "b")
	config := &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{{HostPath: dir}, {HostPath: source}}}
	late, end := context.WithCancel(t.Context())
	end()
	if err := MakeSources(late, config); !errors.Is(err, context.Canceled) {
		t.Errorf("late: %v", err)
	}
	if _, err := os.Lstat(filepath.Dir(source)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it was made: %v", err)
	}
	testutil.Must(t, MakeSources(t.Context(), config))
	if info, err := os.Lstat(source); err != nil || !info.IsDir() {
		t.Errorf("it was not made: %v", err)
	}
}
