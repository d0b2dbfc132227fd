package powercut

import (
	"path/filepath"
	"testing"

	"berth/image"
	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// readLayers reads the layers and joins of an image store, of all drivers, by path.
func readLayers(t *testing.T, store string) map[string]inventory.Tree {
	t.Helper()
	layers := map[string]inventory.Tree{}
	for _, root := range image.LayerRoots("") {
		for _, kind := range []string{"layers", "joins"} {
			for _, name := range machine.ReadDir(filepath.Join(store, root, kind)) {
				path := filepath.Join(root, kind, name)
				found := harness.Get(inventory.ReadTree(filepath.Join(store, path)))(t)
				layers[path] = found
			}
		}
	}
	return layers
}
