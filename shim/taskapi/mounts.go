package taskapi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// ownMounts returns the paths of a container's mounts that exist in its launcher's mount namespace
// only: the root filesystem, and the images mounted as volumes. Most are below the bundle. The root
// filesystem of a container in a user namespace is at a place that other containers share. Another
// mount lies there, so it may be unmounted only once, right after the container has been created.
func ownMounts(spec *specs.Spec, bundle string) (own, shared []string) {
	var paths []string
	if filepath.Dir(spec.Root.Path) == bundle {
		paths = append(paths, spec.Root.Path)
	} else {
		shared = append(shared, spec.Root.Path)
	}
	for _, m := range spec.Mounts {
		if rest, ok := strings.CutPrefix(m.Source, bundle+"/"); ok {
			name, _, _ := strings.Cut(rest, "/")
			if path := filepath.Join(bundle, name); !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
	}
	return paths, shared
}

// passMounts copies mounts from this process's mount namespace to the same paths in the shim's.
func passMounts(shim int, paths []string) (err error) {
	var trees []*os.File
	defer func() {
		for _, tree := range trees {
			err = errors.Join(err, tree.Close())
		}
	}()
	for _, path := range paths {
		fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return &os.PathError{Op: "copy the mount", Path: path, Err: err}
		}
		trees = append(trees, os.NewFile(uintptr(fd), path))
	}
	return inMountsOf(shim, func() error {
		for i, tree := range trees {
			failpoint.Reach("task.mount")
			err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, paths[i], unix.MOVE_MOUNT_F_EMPTY_PATH)
			failpoint.Reach("task.mounted")
			if err != nil {
				return errors.Join(&os.PathError{Op: "mount for the shim", Path: paths[i], Err: err}, unmount(paths[:i]))
			}
		}
		return nil
	})
}

// unmountIn unmounts paths in the mount namespace of a process.
func unmountIn(pid int, paths []string) error {
	if len(paths) == 0 {
		return nil
	}
	return inMountsOf(pid, func() error { return unmount(paths) })
}

// unmount unmounts paths in this thread's mount namespace.
func unmount(paths []string) (failed error) {
	for _, path := range paths {
		failpoint.Reach("task.unmount")
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		failpoint.Reach("task.unmounted")
		if err != nil && err != unix.EINVAL && err != unix.ENOENT {
			failed = errors.Join(failed, &os.PathError{Op: "unmount for the shim", Path: path, Err: err})
		}
	}
	return failed
}

// inMountsOf calls do on a thread in the mount namespace of a process.
func inMountsOf(pid int, do func() error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer namespace.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- os.NewSyscallError("unshare", err)
			return
		}
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
			done <- os.NewSyscallError("setns", err)
			return
		}
		done <- do()
	}()
	return <-done
}
