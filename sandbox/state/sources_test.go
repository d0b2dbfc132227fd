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

// A cancelled creation creates no directory after a look-up of a volume hung.
func TestMakeSourcesStopsWithContext(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "a", "b")
	config := &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{{HostPath: dir}, {HostPath: source}}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := MakeSources(ctx, config); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancellation: %v", err)
	}
	if _, err := os.Lstat(filepath.Dir(source)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the source was created: %v", err)
	}
	testutil.Must(t, MakeSources(t.Context(), config))
	if info, err := os.Lstat(source); err != nil || !info.IsDir() {
		t.Errorf("the source was not created: %v", err)
	}
}
