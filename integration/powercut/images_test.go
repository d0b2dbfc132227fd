package powercut

import (
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/layer"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// testImage is a pulled image, with the content of its layers and a file that identifies it.
type testImage struct {
	name, id string
	layers   []string // directories in the layer store
}

// witness is the file that contains its image's name.
const witness = "/witness"

// testImages pushes images that share layers. The layers contain many files, large files, owners,
// attributes, whiteouts and links into other layers.
func testImages(t *testing.T) map[string]*testImage {
	t.Helper()
	small, large := manyFiles("small", 200, 900), someFiles("large", 3, 700<<10)
	links := fixture.Tree{
		fixture.Hardlink("linked/busybox", "bin/busybox"), fixture.Hardlink("linked/file", "small/3/33"),
		fixture.Whiteout("small/4/", "44"), fixture.Opaque("small/5/"), fixture.File("small/5/new", 0o640, "new").Owned(7, 8),
		fixture.File("tmp/implied", 0o600, "in a directory that is not listed"),
	}
	all := map[string]*testImage{}
	for name, trees := range map[string][]fixture.Tree{
		"a": {small}, "b": {small, large}, "c": {small, links}, "d": {large, manyFiles("other", 60, 3000)}, "e": {large, small, links},
	} {
		own := fixture.Tree{fixture.File(strings.TrimPrefix(witness, "/"), 0o644, name)}
		all[name] = push(t, name, harness.BuildImage(t, v1.Config{}, append(trees, own)...))
	}
	return all
}

// cutName is the image whose transfer breaks off.
const cutName = "f"

// cutImage pushes the image with a large layer that does not compress, and makes the registry break
// off the transfer of that layer while n.cut is lowered.
func (n *node) cutImage(t *testing.T) {
	t.Helper()
	large := harness.PackLayer(t, someFiles("cut", 1, 3<<20), fixture.Gzip)
	own := harness.PackLayer(t, fixture.Tree{fixture.File(strings.TrimPrefix(witness, "/"), 0o644, cutName)}, fixture.Gzip)
	n.testImages[cutName] = push(t, cutName, harness.Get(fixture.Image(v1.Config{}, large, own))(t))
	content := harness.Get(large.Compressed())(t)
	defer content.Close() // read only
	n.cut = &fixture.Cut{Digest: harness.DigestOf(t, large), Blob: harness.Get(io.ReadAll(content))(t), After: 2 << 20}
	n.cut.Lift()
	harness.Registry.Hook(n.cut.Hook)
	t.Cleanup(func() { harness.Registry.Hook(nil) })
}

func push(t *testing.T, name string, img v1.Image) *testImage {
	t.Helper()
	p := &testImage{}
	p.name, p.id = harness.Push(t, harness.Registry, "powercut/"+name+":latest", img)
	for _, l := range harness.Get(img.Layers())(t) {
		blob, diffID := harness.Get(l.Digest())(t), harness.Get(l.DiffID())(t)
		from := layer.Source{Blob: digest.Digest(blob.String()), DiffID: digest.Digest(diffID.String())}
		p.layers = append(p.layers, from.Name().Encoded())
	}
	return p
}

// manyFiles returns a tree of directories with ten files each.
func manyFiles(dir string, files, size int) fixture.Tree {
	out := fixture.Tree{fixture.Dir(dir, 0o755)}
	for i := range files {
		if i%10 == 0 {
			out = append(out, fixture.Dir(fmt.Sprintf("%s/%d", dir, i/10), 0o750).Owned(i, i+1))
		}
		name := fmt.Sprintf("%s/%d/%d", dir, i/10, i)
		file := fixture.File(name, int64(0o600|i%8), strings.Repeat(name+"\n", size/len(name))).Owned(i, 1000)
		if i%7 == 0 {
			file = file.WithXattr("user.number", fmt.Sprint(i))
		}
		out = append(out, file)
	}
	return out
}

// someFiles returns a tree of files that do not compress.
func someFiles(dir string, files, size int) fixture.Tree {
	random := rand.New(rand.NewPCG(7, 8))
	out := fixture.Tree{fixture.Dir(dir, 0o711)}
	for i := range files {
		content := make([]byte, size)
		for j := range content {
			content[j] = byte(random.Uint32())
		}
		out = append(out, fixture.File(fmt.Sprintf("%s/%d", dir, i), 0o444, string(content)))
	}
	return out
}

// known contains a daemon's images: their tags by ID.
type known map[string][]string

// list returns the daemon's images.
func list(t *testing.T, d *harness.Daemon) known {
	t.Helper()
	return knownOf(harness.Get(d.Images.ListImages(t.Context(), nil))(t))
}

func knownOf(images []*runtimeapi.Image) known {
	k := known{}
	for _, i := range images {
		k[i.Id] = slices.Sorted(slices.Values(i.RepoTags))
	}
	return k
}

// pulled returns the images after a pull of name, which now refers to id.
func (k known) pulled(name, id string) known {
	next := known{}
	for other, tags := range k {
		next[other] = slices.DeleteFunc(slices.Clone(tags), func(tag string) bool { return tag == name })
	}
	next[id] = slices.Sorted(slices.Values(append(next[id], name)))
	return next
}

// removed returns the images after the removal of an image.
func (k known) removed(id string) known {
	next := maps.Clone(k)
	delete(next, id)
	return next
}

func (k known) equal(other known) bool {
	return maps.EqualFunc(k, other, func(a, b []string) bool { return slices.Equal(a, b) })
}

// change is a call that changes the images. It contains the length of the disk's log at its begin
// and end.
type change struct {
	what         string
	begun, ended int
	after        known
}

// history is the sequence of changes of the images.
type history struct {
	before  known // before the first change
	changes []change
}

// at returns the allowed states after a power failure at position: the state before it, and the
// state after a call in progress.
func (h history) at(position int) (allowed []known, under string) {
	last := h.before
	for _, c := range h.changes {
		switch {
		case position <= c.begun:
			return []known{last}, under
		case position < c.ended:
			return []known{last, c.after}, c.what
		}
		last, under = c.after, "after "+c.what
	}
	return []known{last}, under
}

// latest returns the final state.
func (h history) latest() known {
	if len(h.changes) == 0 {
		return h.before
	}
	return h.changes[len(h.changes)-1].after
}

// readLayers reads the layers and joins of an image store, of all drivers, by path.
func readLayers(t *testing.T, store string) map[string]inventory.Tree {
	t.Helper()
	layers := map[string]inventory.Tree{}
	for _, root := range image.LayerRoots("") {
		for _, kind := range []string{"layers", "joins"} {
			for _, name := range machine.ReadDir(filepath.Join(store, root, kind)) {
				path := filepath.Join(root, kind, name)
				if _, err := os.Readlink(filepath.Join(store, path)); err == nil {
					continue // of an incomplete layer whose completion was interrupted
				}
				found := harness.Get(inventory.ReadTree(filepath.Join(store, path)))(t)
				layers[path] = found
			}
		}
	}
	return layers
}
