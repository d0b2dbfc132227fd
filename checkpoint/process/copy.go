package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/checkpoint/process/dump"
	"berth/internal/criu"
	"berth/internal/failpoint"
	"berth/internal/host"
	"berth/internal/safefs"
	"berth/internal/version"
)

// CopyLayer copies the upper directory of a writable layer into the directory of a container.
func CopyLayer(ctx context.Context, upper string, into *os.File) error {
	from, err := safefs.OpenRoot(upper)
	if err != nil {
		return err
	}
	defer from.Close() // it was only read
	var deleted []string
	err = writeNew(into, archive.RootfsDiffFile, func(f *os.File) (err error) {
		deleted, err = dump.Layer(ctx, from, f)
		return err
	})
	if err != nil || len(deleted) == 0 {
		return err
	}
	return writeJSON(into, archive.DeletedFilesFile, deleted)
}

// CopyTree copies a directory into a new tar in the directory into. The error wraps os.ErrNotExist
// if there is no such directory.
func CopyTree(ctx context.Context, path string, into *os.File, name string) error {
	from, err := safefs.OpenRoot(path)
	if err != nil {
		return err
	}
	defer from.Close() // it was only read
	return writeNew(into, name, func(f *os.File) error { return dump.Directory(ctx, from, f) })
}

// writeNew creates a file in a directory and fills it.
func writeNew(dir *os.File, name string, fill func(*os.File) error) error {
	failpoint.Reach("checkpoint.make-file")
	f, err := safefs.Open(dir, name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	failpoint.Reach("checkpoint.file-made")
	if err != nil {
		return err
	}
	err = fill(f)
	failpoint.Reach("checkpoint.file-filled")
	return errors.Join(err, f.Close())
}

func writeJSON(dir *os.File, name string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	return writeNew(dir, name, func(f *os.File) error { _, err := f.Write(data); return err })
}

// WriteBindMounts writes CRI-O's list of the mount points that a restore must make into the
// directory of a container. mounted reports whether the container has a mount at a path.
func WriteBindMounts(dir *os.File, requested []*runtimeapi.Mount, mounted func(path string) bool) error {
	type bindMount struct {
		Source      string `json:"source"`
		Destination string `json:"destination"`
		FileType    string `json:"file_type"`
		Permissions uint32 `json:"permissions"`
	}
	mounts := []bindMount{}
	for _, m := range requested {
		info, err := os.Stat(m.GetHostPath())
		if m.GetHostPath() == "" || err != nil || !mounted(m.GetContainerPath()) {
			continue
		}
		kind := "file"
		if info.IsDir() {
			kind = "directory"
		}
		place := strings.TrimSuffix(m.GetContainerPath(), "/")
		mounts = append(mounts, bindMount{m.GetHostPath(), place, kind, uint32(info.Mode().Perm())})
	}
	return writeJSON(dir, archive.BindMountsFile, mounts)
}

// DescribeNode returns what a restore on another node must compare. v is zero if CRIU was not used.
func DescribeNode(v criu.Version) (archive.Node, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return archive.Node{}, os.NewSyscallError("uname", err)
	}
	features, err := host.CPUFeatures()
	return archive.Node{
		Berth:        version.Get(),
		CRIU:         v.Number(),
		Kernel:       unix.ByteSliceToString(uts.Release[:]),
		Architecture: runtime.GOARCH,
		CPUFeatures:  features,
	}, err
}
