package crash

import (
	"errors"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
)

// imageNames names two images that share two of their three layers. tag moves from the first to the
// second.
type imageNames struct{ first, second, tag string }

func first(n imageNames) string  { return n.first }
func second(n imageNames) string { return n.second }

var (
	firstImage  = sync.OnceValues(func() (v1.Image, error) { return threeLayers("first") })
	secondImage = sync.OnceValues(func() (v1.Image, error) { return threeLayers("second") })
)

// images pushes the two images once.
var images = sync.OnceValue(func() imageNames {
	a, errA := firstImage()
	b, errB := secondImage()
	if err := errors.Join(errA, errB); err != nil {
		panic(err)
	}
	push := func(name string, img v1.Image) string {
		full, err := harness.Registry.Push(name, img)
		if err != nil {
			panic(err)
		}
		return full
	}
	return imageNames{push("crash/first:1", a), push("crash/second:1", b), push("crash/moving:1", a)}
})

// threeLayers returns an image whose layers need a join, because one layer hard-links a file of
// another.
func threeLayers(name string) (v1.Image, error) {
	trees := []fixture.Tree{
		{fixture.Dir("bin", 0o755), fixture.File("bin/program", 0o755, "program"), fixture.Symlink("bin/link", "program"), fixture.Dir("etc", 0o700).WithXattr("user.berth", "kept")},
		{fixture.File("etc/config", 0o640, "config").Owned(7, 8), fixture.Hardlink("bin/other", "bin/program"), fixture.Whiteout("bin/", "link")},
		{fixture.Dir("data", 0o755), fixture.File("data/name", 0o644, name), fixture.Opaque("etc/")},
	}
	var layers []v1.Layer
	for _, tree := range trees {
		l, err := tree.Layer(fixture.Gzip)
		if err != nil {
			return nil, err
		}
		layers = append(layers, l)
	}
	return fixture.ImageOf(v1.Config{}, layers...)
}

func has(which func(imageNames) string) func(*testing.T, *world) { return do(pull(which)) }

func pull(which func(imageNames) string) func(*testing.T, *world) error {
	return func(t *testing.T, w *world) error {
		_, err := w.d.TryPull(t, which(images()), nil)
		return err
	}
}

// moveTag pulls the first image by a tag and then pushes the second image to that tag.
func moveTag(t *testing.T, w *world) {
	img := harness.Get(firstImage())(t)
	harness.Push(t, harness.Registry, "crash/moving:1", img)
	_, err := w.d.TryPull(t, images().tag, nil)
	harness.Must(t, err)
	img, err = secondImage()
	harness.Must(t, err)
	harness.Push(t, harness.Registry, "crash/moving:1", img)
}

func pullTag(t *testing.T, w *world) error {
	_, err := w.d.TryPull(t, images().tag, nil)
	return err
}

func removeImage(which func(imageNames) string) func(*testing.T, *world) error {
	return func(t *testing.T, w *world) error {
		return w.d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: which(images())})
	}
}

// removeImages removes the images that the operations have pulled.
func (w *world) removeImages(t *testing.T) {
	t.Helper()
	for _, i := range harness.Get(w.d.Images.ListImages(t.Context(), nil))(t) {
		if len(i.RepoTags) == 0 || i.RepoTags[0] != harness.BaseImage {
			harness.Must(t, w.d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: i.Id}))
		}
	}
}
