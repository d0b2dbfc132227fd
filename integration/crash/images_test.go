package crash

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
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

// cutPull is the transfer of a layer that breaks off, in an image whose other layer arrives. The
// pull fails and keeps the other layer, and what has arrived of this one.
type cutPull struct {
	*fixture.Cut
	name   string
	daemon atomic.Pointer[harness.Daemon] // whose pull breaks off
}

// cutImage pushes that image once, and makes the registry break off the transfer.
var cutImage = sync.OnceValue(func() *cutPull {
	random := rand.NewChaCha8([32]byte{1})
	noise := func(name string, size int) v1.Layer {
		content := make([]byte, size)
		_, _ = random.Read(content) // never fails
		l, err := fixture.Tree{fixture.File(name, 0o644, string(content))}.Layer(fixture.Gzip)
		if err != nil {
			panic(err)
		}
		return l
	}
	whole, broken := noise("whole", 5<<18), noise("broken", 3<<20)
	img, err := fixture.ImageOf(v1.Config{}, whole, broken)
	if err != nil {
		panic(err)
	}
	c := &cutPull{Cut: &fixture.Cut{After: 5 << 19}}
	if err := c.push(img, broken); err != nil {
		panic(err)
	}
	c.Wait = func(ctx context.Context) { // until the other layer is kept: it would end with the pull
		kept := filepath.Join(c.daemon.Load().Root, "images/partial/layers")
		_ = harness.WaitFor(func() error {
			if ctx.Err() == nil && len(machine.ReadDir(kept)) == 0 {
				return errors.New("no layer is kept")
			}
			return nil
		})
	}
	harness.Registry.Hook(c.Hook)
	return c
})

// push pushes the image and reads the layer whose transfer will break off.
func (c *cutPull) push(img v1.Image, broken v1.Layer) (err error) {
	if c.name, err = harness.Registry.Push("crash/cut:1", img); err != nil {
		return err
	}
	d, err := broken.Digest()
	if err != nil {
		return err
	}
	c.Digest = d.String()
	content, err := broken.Compressed()
	if err != nil {
		return err
	}
	defer content.Close() // read only
	c.Blob, err = io.ReadAll(content)
	return err
}

// failPull pulls an image whose transfer breaks off.
func failPull(t *testing.T, w *world) error {
	c := cutImage()
	c.daemon.Store(w.d)
	c.Lower()
	_, err := w.d.TryPull(t, c.name, nil)
	if status.Code(err) == codes.PermissionDenied { // the registry's last answer
		return nil
	}
	return fmt.Errorf("the pull that breaks off returned: %w", err)
}

// pullRest pulls an image after a transfer of it has broken off.
func pullRest(t *testing.T, w *world) error {
	c := cutImage()
	c.Lift()
	_, err := w.d.TryPull(t, c.name, nil)
	return err
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
