package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/oci"
)

// MakeSources creates missing source directories of a container's mounts. The CRI asks for an
// error. If a hostPath has no type, kubelet leaves the check to the runtime. containerd and CRI-O
// create the path, and workloads rely on that. Like theirs, the directories stay. MakeSources
// follows no dangling link. After ctx has ended it creates no directory. If a volume hangs, the
// container may have been removed long before.
func MakeSources(ctx context.Context, config *runtimeapi.ContainerConfig) error {
	for _, m := range config.GetMounts() {
		source := m.GetHostPath()
		if oci.IsImageVolume(m) || !path.IsAbs(source) || strings.IndexByte(source, 0) >= 0 {
			continue // later checks reject the mount
		}
		if _, err := os.Lstat(source); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("mount of %s: make host_path %s: %w", m.GetContainerPath(), source, err)
		}
		failpoint.Reach("mount.make-source")
		err := os.MkdirAll(source, 0o755)
		failpoint.Reach("mount.source-made")
		if errdefs.IsBadPath(err) || errors.Is(err, fs.ErrExist) {
			return errdefs.InvalidArgument("mount of %s: make host_path %.300q: %w", m.GetContainerPath(), source, err)
		}
		if err != nil {
			return fmt.Errorf("mount of %s: make host_path %s: %w", m.GetContainerPath(), source, err)
		}
	}
	return nil
}
