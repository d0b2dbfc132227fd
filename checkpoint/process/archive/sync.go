package archive

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sync/errgroup"

	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// syncAll writes the archive in dir to the disk: its files and directories, with the manifest under
// its first name.
func syncAll(ctx context.Context, dir *os.File, m *Manifest) error {
	names := map[string]bool{newManifest: true, ".": true}
	for _, f := range m.Files {
		for name := f.Path; !names[name]; name = path.Dir(name) {
			names[name] = true
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(hashers)
	failpoint.Reach("checkpoint.sync")
	for name := range names {
		group.Go(func() error {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			return syncFile(dir, name)
		})
	}
	err := group.Wait()
	failpoint.Reach("checkpoint.synced")
	if err != nil {
		return fmt.Errorf("sync checkpoint: %w", err)
	}
	return nil
}

func syncFile(dir *os.File, name string) error {
	file, err := safefs.Open(dir, name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}
