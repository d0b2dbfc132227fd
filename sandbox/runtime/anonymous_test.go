package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
)

// The symlinks of an image cannot make the resolution of its volumes take long.
func TestVolumePathsAreLimited(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 30 {
		target := strings.Repeat("./", 1500) + fmt.Sprint("l", i+1)
		testutil.Must(t, os.Symlink(target, filepath.Join(dir, fmt.Sprint("l", i))))
	}
	root, err := os.Open(dir)
	testutil.Must(t, err)
	defer root.Close()
	resolve := resolver(root)
	if got, err := resolve("/l0"); got != "/l30" || err != nil {
		t.Errorf("the first path: %q, %v", got, err)
	}
	if _, err := resolve("/l0/x"); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("the second path: %v", err)
	}
}

// unpackerFunc implements Unpacker.
type unpackerFunc func(ctx context.Context, blob io.Reader) error

func (f unpackerFunc) Unpack(ctx context.Context, _ *os.File, blob io.Reader, _ unpack.Job) (unpack.Result, error) {
	return unpack.Result{}, f(ctx, blob)
}

// The copy of a volume fails with the cause, whichever end fails first.
func TestCopyVolumeFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(dir, "data"), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "data/file"), make([]byte, 1<<20), 0o600))
	image, err := os.Open(dir)
	testutil.Must(t, err)
	defer image.Close()
	for _, tt := range []struct {
		name, path string
		unpack     unpackerFunc
		want       error
	}{
		{"full disk", "/data", func(_ context.Context, blob io.Reader) error { blob.(unpack.Stopper).Stop(); return unix.ENOSPC }, unix.ENOSPC},
		{"unreadable image", "/missing", func(_ context.Context, blob io.Reader) error { _, err := io.ReadAll(blob); return err }, unix.ENOENT},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := slog.New(slog.DiscardHandler)
			k := Launcher{Unpacker: tt.unpack, Tasks: task.NewRunner(log, nil), Log: log}
			if err := k.copyVolume(t.Context(), image, tt.path, t.TempDir(), nil); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}
