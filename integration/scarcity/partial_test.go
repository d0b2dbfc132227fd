package scarcity

import (
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// noisy returns an image with one layer of a size, which does not compress, and that layer's blob.
func noisy(t *testing.T, seed byte, size int) (v1.Image, string, []byte) {
	t.Helper()
	content := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(content) // never fails
	l := harness.PackLayer(t, fixture.Tree{fixture.File("noise", 0o644, string(content))}, fixture.Gzip)
	blob := harness.Get(l.Compressed())(t)
	defer blob.Close() // read only
	return harness.Get(fixture.ImageOf(v1.Config{}, l))(t), harness.DigestOf(t, l), harness.Get(io.ReadAll(blob))(t)
}

// fillBut uses up all free bytes except for some.
func (k *smallDisk) fillBut(t *testing.T, free int64) {
	t.Helper()
	k.fill(t)
	info := harness.Get(os.Stat(k.ballast))(t)
	harness.Must(t, os.Truncate(k.ballast, info.Size()-free))
}

// On a disk that has room for a layer only without the bytes of a failed pull, these bytes give
// way: to their own layer, and to that of another image.
func TestPartialLayersOnFullDisk(t *testing.T) {
	const mib = 1 << 20
	for _, tc := range []struct {
		name, config string
		other        bool // another image is pulled
		retried      bool // the pull may fail once
	}{
		{"own layer", "", false, false},
		{"own layer, no reserve", "disk.reserve_percent = 0", false, false},
		{"other image", "", true, false},
		{"other image, no reserve", "disk.reserve_percent = 0", true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var disk *smallDisk
			d := harness.StartDaemon(t, harness.WithConfig(tc.config), func(t *testing.T, d *harness.Daemon) {
				disk = newDisk(t, d, "disk", tmpfs, 96*mib)
				d.Root = filepath.Join(disk.path, rootDisk)
			})
			r := harness.NewRegistry(t)
			img, digest, blob := noisy(t, 1, 12*mib)
			name, id := harness.Push(t, r, "cut:latest", img)
			cut := &fixture.Cut{Digest: digest, Blob: blob, After: 8 * mib}
			r.Hook(cut.Hook)
			_, err := d.TryPull(t, name, nil)
			harness.WantCode(t, err, codes.PermissionDenied)
			kept := filepath.Join(d.Root, "images/partial/blobs")
			harness.Equal(t, "kept files", len(machine.ReadDir(kept)), 1)
			if tc.other {
				img, _, _ = noisy(t, 2, 12*mib)
				name, id = harness.Push(t, r, "other:latest", img)
			}
			cut.Lift()
			disk.fillBut(t, 10*mib)
			got, err := d.TryPull(t, name, nil)
			if tc.retried && err != nil {
				harness.WantCode(t, err, codes.ResourceExhausted)
				got, err = d.TryPull(t, name, nil)
			}
			harness.Must(t, err)
			harness.Equal(t, "image", got, id)
			harness.Equal(t, "kept files", len(machine.ReadDir(kept)), 0)
			disk.empty(t)
		})
	}
}
