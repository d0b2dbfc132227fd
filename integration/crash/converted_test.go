package crash

import (
	"errors"
	"slices"
	"testing"

	"berth/image/erofs"
	"berth/integration/harness"
)

// converted are operations on an image that must be stored as directories, although two of its
// layers are already stored for EROFS. The daemon converts these two to directories. A node
// converts layers if the merge of an image's layers shows that the image is too large for EROFS.
var converted = []operation{
	{name: "PullImage_converted", daemon: onDisk, prepare: packed, request: pullConverted, more: true},
	{name: "Recovery_of_PullImage_converted", daemon: onDisk, first: &point{"layer.marked-opaque", 1}, prepare: packed, request: pullConverted, more: true},
}

const (
	asDirectories = `layer_driver = "directory"`
	asEROFS       = `layer_driver = "erofs"`
)

// onDisk starts the daemon with the EROFS driver, so that the driver's files exist before the
// operation.
func onDisk(t *testing.T) harness.DaemonOption {
	if err := erofs.Probe("/var/tmp"); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
	return harness.WithLayerDriver("erofs")
}

// packed pulls an image with the EROFS driver, and restarts the daemon with the directory driver.
func packed(t *testing.T, w *world) {
	if slices.Contains(w.d.Extra, asDirectories) { // set by the previous case
		w.d.SetConfig(t, asDirectories, asEROFS)
		w.d.Restart(t)
	}
	has(first)(t, w)
	w.d.SetConfig(t, asEROFS, asDirectories)
	w.d.Restart(t)
}

// pullConverted pulls an image that shares two layers with the first image. It fails if these two
// are downloaded.
func pullConverted(t *testing.T, w *world) error {
	img := harness.Get(secondImage())(t)
	layers := harness.Get(img.Layers())(t)
	fetched := func() (n int) {
		for _, l := range layers[:2] {
			n += harness.Registry.Count("GET", harness.Get(l.Digest())(t).String())
		}
		return n
	}
	before := fetched()
	err := pull(second)(t, w)
	if n := fetched() - before; n > 0 {
		t.Errorf("%d stored layers were downloaded again", n)
	}
	return err
}
