package hostile

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	imagestore "berth/image"
	"berth/image/erofs"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/internal/testutil"
)

// onDisk starts a daemon whose root is on a separate disk. Layers may use half of it.
func onDisk(t *testing.T, bytes, inodes int) *harness.Daemon {
	t.Helper()
	return startDaemonWith(t, []string{"disk.reserve_percent = 50"}, func(t *testing.T, d *harness.Daemon) {
		place := filepath.Join(d.Dir, "disk")
		harness.Must(t, os.Mkdir(place, 0o711))
		harness.Must(t, unix.Mount("berth-test", place, "tmpfs", 0, fmt.Sprintf("mode=0711,size=%d,nr_inodes=%d", bytes, inodes)))
		d.Mounts = append(d.Mounts, place)
		d.Root = filepath.Join(place, "root")
	})
}

// Layers that fit on the disk but exceed the free reserve are refused.
func TestLayersThatFillTheDisk(t *testing.T) {
	testutil.Long(t)
	for _, c := range []struct {
		what   string
		inodes int
		tar    io.Reader
		text   string
	}{
		{"bytes", 100_000, bigFile(t, letters{}, 200<<20), "are kept free"},
		// The daemon checks the limit periodically, so the disk may be full before the first check.
		{"inodes", 2000, bytes.NewReader(packed(t, repeated(4000, func(i int) fixture.Entry { return fixture.File(fmt.Sprint("f", i), 0o644, "") })...)), "no space left on device"},
	} {
		t.Run(c.what, func(t *testing.T) {
			d := onDisk(t, 256<<20, c.inodes)
			before := free(t, d)
			_, name := image(t, gzipped(t, c.tar))
			refused(t, d, name, codes.ResourceExhausted, c.text)
			allFree(t, d, before)
		})
	}
}

// free returns the statistics of the filesystem of the daemon's root.
func free(t *testing.T, d *harness.Daemon) unix.Statfs_t {
	t.Helper()
	var fs unix.Statfs_t
	harness.Must(t, unix.Statfs(d.Root, &fs))
	return fs
}

// allFree waits until the daemon has deleted a refused layer in the background.
func allFree(t *testing.T, d *harness.Daemon, before unix.Statfs_t) {
	t.Helper()
	const slack = 64 // blocks of directories that have grown
	harness.EventuallyGot(t, "the disk has as much free space as before", func() (bool, any) {
		now := free(t, d)
		return now.Bavail+slack >= before.Bavail && now.Ffree+slack >= before.Ffree, now
	})
}

// A layer has one file more than allowed. Each file costs the tar half a kilobyte. With
// BERTH_TORTURE=1 the limit is a million files.
func TestLayerWithTooManyFiles(t *testing.T) {
	most := 20_000
	if harness.Thorough() {
		most = 1_000_000
	}
	d := startDaemon(t, fmt.Sprintf("image.max_layer_entries = %d", most))
	before := free(t, d)
	reader, writer := io.Pipe()
	go func() { writer.CloseWithError(writeFiles(writer, most+1)) }()
	_, name := image(t, gzipped(t, reader))
	code, text := codes.FailedPrecondition, fmt.Sprintf("more than the %d entries", most)
	if before.Files > 0 && before.Ffree < uint64(2*most) {
		code, text = codes.ResourceExhausted, "no space left on device"
	}
	refused(t, d, name, code, text)
	harness.Eventually(t, "the files are deleted", func() error {
		for _, root := range imagestore.LayerRoots(filepath.Join(d.Root, "images")) {
			left, err := filepath.Glob(filepath.Join(root, "trash", "*"))
			if err != nil || len(left) > 0 {
				return fmt.Errorf("%d directories in %s's trash, %d of %d inodes free, %v", len(left), root, free(t, d).Ffree, before.Ffree, err)
			}
		}
		return nil
	})
}

// writeFiles writes a tar of n empty files, a thousand in each directory.
func writeFiles(w io.Writer, n int) error {
	out := tar.NewWriter(w)
	for i := range n {
		if err := out.WriteHeader(&tar.Header{Name: fmt.Sprintf("%d/%d", i/1000, i), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
			return err
		}
	}
	return out.Close()
}

// Two images are pulled at a time, each with almost as many files as the memory for merging layers
// allows.
func TestMergesOfManyFilesLimitMemory(t *testing.T) {
	testutil.Long(t)
	if err := erofs.Probe("/var/tmp"); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
	const files = 140_000
	d := startDaemonWith(t, nil, harness.WithLayerDriver("auto"))
	var names [2]string
	for i := range names {
		reader, writer := io.Pipe()
		go func() { writer.CloseWithError(writeFiles(writer, files+i)) }()
		_, names[i] = image(t, gzipped(t, reader))
	}
	pulls := make(chan error)
	for _, name := range names {
		go func() { pulls <- pull(t, d, name, nil) }()
	}
	for range names {
		if err := <-pulls; err != nil {
			t.Error(err)
		}
	}
	images, err := filepath.Glob(filepath.Join(d.Root, "images/erofs/joins/*/image"))
	if harness.Must(t, err); len(images) != len(names) {
		t.Errorf("%d of %d layer images were created", len(images), len(names))
	}
	for _, name := range names {
		harness.Must(t, d.Images.RemoveImage(t.Context(), imageSpec(name)))
	}
	for _, name := range names {
		noTraceOf(t, d, name)
	}
}

// A layer has many files with the maximum size of extended attributes; a million with
// BERTH_TORTURE=1. The filesystem sets the maximum: ext4 has one block for a file's attributes.
func TestManyExtendedAttributes(t *testing.T) {
	d := startDaemon(t)
	files, each := 10, 5000
	if harness.Thorough() {
		files = 200
	}
	_, name := image(t, gzipped(t, bytes.NewReader(packed(t, repeated(files, func(i int) fixture.Entry { return withXattrs(fmt.Sprint("f", i), each) })...))))
	if err := pull(t, d, name, nil); err != nil {
		harness.WantCode(t, err, codes.ResourceExhausted, "extended attribute", "no space left on device")
		noTraceOf(t, d, name)
		return
	}
	harness.Must(t, d.Images.RemoveImage(t.Context(), imageSpec(name)))
	noTraceOf(t, d, name)
}
