package powercut

import (
	"path/filepath"
	"testing"

	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// readLayers reads the layers and joins of an image store, by their path in it.
func readLayers(t *testing.T, store string) map[string]inventory.Tree {
	t.Helper()
	layers := map[string]inventory.Tree{}
	for _, kind := range []string{"layers", "joins"} {
		for _, name := range machine.ReadDir(filepath.Join(store, kind)) {
			found, err := inventory.ReadTree(filepath.Join(store, kind, name))
			harness.Must(t, err)
			layers[filepath.Join(kind, name)] = found
		}
	}
	return layers
}
