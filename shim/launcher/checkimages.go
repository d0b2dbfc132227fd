package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"berth/shim/launcher/criuimages"
	"berth/shim/proto"
)

// checkImages refuses a checkpoint that CRIU must not restore. Its signature says nothing here: the
// container chose a part of its content, and the request may permit less than that of the
// checkpoint.
func (b *restoreBackend) checkImages() error {
	images, err := os.Open(b.Restore.Images)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer images.Close() // it was only read
	err = b.checkFiles(images)
	if err == nil {
		err = b.checkFilters(images)
	}
	if refused := (*criuimages.Refused)(nil); errors.As(err, &refused) {
		return proto.Errorf(proto.FailedPrecondition, "restore from the checkpoint: %v", refused)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return proto.Errorf(proto.FailedPrecondition, "the checkpoint is not complete: %v", err)
	}
	return err
}

// checkFiles refuses names that would lead CRIU out of the container. The root filesystem is
// mounted and no process of the container runs.
func (b *restoreBackend) checkFiles(images *os.File) error {
	root, err := os.Open(b.Spec.Root.Path)
	if err != nil {
		return fmt.Errorf("open root filesystem: %w", err)
	}
	defer root.Close() // it was only read
	b.rootLinks, err = criuimages.CheckFiles(images, root)
	return err
}

// checkFilters refuses threads with another seccomp filter than that of the spec.
func (b *restoreBackend) checkFilters(images *os.File) error {
	if b.config.Seccomp == nil {
		return nil
	}
	permitted, err := b.l.filters.Filters(b.config.Seccomp)
	if err != nil {
		return err
	}
	if len(permitted) == 0 {
		return proto.Errorf(proto.FailedPrecondition, "the seccomp profile cannot be compiled here")
	}
	b.filters, err = criuimages.CheckFilters(images, permitted)
	return err
}
