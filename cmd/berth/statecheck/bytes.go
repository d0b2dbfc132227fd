package statecheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Bytes: what is in each layer is what was counted when it was made: as many files, with as many
// bytes. It is not compared what the bytes are.

// compareBytes walks all layers, once: they never change.
func compareBytes(ctx context.Context, f *facts, d *finder) error {
	for _, s := range f.layers.Layers {
		used, err := s.Count(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if _, gone := os.Lstat(s.Dir); errors.Is(gone, fs.ErrNotExist) {
			continue
		}
		want := fmt.Sprintf("%d files with %d bytes", s.Usage.Inodes, s.Usage.Bytes)
		switch {
		case err != nil:
			d.differ(s.Dir, want, "%v", err)
		case used != s.Usage:
			d.differ(s.Dir, want, "%d files with %d bytes", used.Inodes, used.Bytes)
		}
	}
	return nil
}
