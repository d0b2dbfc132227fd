package layer

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/internal/testutil"
)

// Inspect finds a Store's layers and their usage without opening the Store.
func TestInspect(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	low := create(t, s, makeTar(t, dir("d", 0o700), file("d/a", "content")))
	top := create(t, s, makeTar(t, file("d/b", "more"), hardlink("d/c", "d/a")))
	if _, err := s.Stack(context.Background(), []digest.Digest{low, top}); err != nil { // makes a join
		t.Fatal(err)
	}
	half := filepath.Join(root, "tmp", "half")
	bad := filepath.Join(root, "layers", "bad")
	testutil.Must(t, os.Mkdir(half, 0o700))
	testutil.Must(t, os.Mkdir(bad, 0o700))
	got, err := Inspect(root)
	testutil.Must(t, err)
	if len(got.Layers) != 2 || len(got.Joins) != 1 || !slices.Equal(got.Joins[0].Layers, []digest.Digest{low, top}) {
		t.Fatalf("got %+v", got)
	}
	if len(got.Damaged) != 1 || got.Damaged[bad] == nil || !slices.Equal(got.Making, []string{half}) {
		t.Errorf("got %+v", got)
	}
	for _, stored := range []Stored{got.Layers[low], got.Layers[top]} {
		used, err := stored.Count(context.Background())
		testutil.Must(t, err)
		if used != stored.Usage {
			t.Errorf("%s: counted %+v, recorded %+v", stored.Dir, used, stored.Usage)
		}
	}
	if got.Usage() != s.Usage() {
		t.Errorf("usage is %+v, the store's %+v", got.Usage(), s.Usage())
	}
	if info, err := s.Info(low); err != nil || got.Layers[low].Sum != info.Sum || info.Sum.IsZero() {
		t.Errorf("the sum is %s, read %s, %v", info.Sum, got.Layers[low].Sum, err)
	}
	damaged := filepath.Join(got.Layers[low].Dir, treeDir, "d/a")
	testutil.Must(t, os.WriteFile(damaged, []byte("CONTENT"), 0))
	if now, err := got.Layers[low].SumNow(context.Background()); err != nil || now == got.Layers[low].Sum {
		t.Errorf("a file has changed, and the sum is %s, %v", now, err)
	}
	testutil.Must(t, os.Remove(damaged))
	if used, err := got.Layers[low].Count(context.Background()); err != nil || used == got.Layers[low].Usage {
		t.Errorf("a file is missing, and %+v counted, %v", used, err)
	}
}
