package powercut

import (
	"path/filepath"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
)

// readLayers reads the layers and joins of an image store, by their path in it.
func readLayers(t *testing.T, store string) map[string]harness.Tree {
	t.Helper()
	layers := map[string]harness.Tree{}
	for _, kind := range []string{"layers", "joins"} {
		for _, name := range machine.ReadDir(filepath.Join(store, kind)) {
			found, err := harness.ReadTree(filepath.Join(store, kind, name))
			harness.Must(t, err)
			layers[filepath.Join(kind, name)] = found
		}
	}
	return layers
}
