package launcher

import (
	"errors"
	"fmt"
	"os"

	"berth/checkpoint/deleted"
	"berth/shim/proto"
)

// checkDeleted refuses a checkpoint whose deleted files would lead CRIU out of the container. The root
// filesystem is mounted and no process of the container runs. The node's signature says nothing here:
// the container chose the paths and the links.
func (b *restoreBackend) checkDeleted() error {
	images, err := os.Open(b.Restore.Images)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer images.Close() // it was only read
	root, err := os.Open(b.Spec.Root.Path)
	if err != nil {
		return fmt.Errorf("open root filesystem: %w", err)
	}
	defer root.Close() // it was only read
	err = deleted.Check(images, root)
	if refused := (*deleted.Refused)(nil); errors.As(err, &refused) {
		return proto.Errorf(proto.FailedPrecondition, "restore from the checkpoint: %v", refused)
	}
	return err
}
