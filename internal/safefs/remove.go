package safefs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// openLevels is how many directories of a tree are open at a time.
const openLevels = 64

// RemoveAll removes the tree at path, however deep it is. The parent directory must be trusted, but
// the tree may be hostile. os.RemoveAll would hold a descriptor for each level, and a process can
// nest directories until its disk is full. A missing path is no error. A removal that ctx ended, or
// that failed, can be repeated. Until then, parts of the tree may have other names within path.
func RemoveAll(ctx context.Context, path string) error {
	parent, err := os.Open(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	defer parent.Close()
	if err := removeAll(ctx, int(parent.Fd()), filepath.Base(path)); err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// removeAll removes name in the directory dir.
func removeAll(ctx context.Context, dir int, name string) error {
	top, err := unlinkOrOpen(dir, name)
	if top == nil {
		return err
	}
	defer top.Close()
	r := remover{ctx: ctx, top: top}
	if err := r.empty(top, 1); err != nil {
		return err
	}
	return rmdir(dir, name)
}

// remover removes the content of a directory. It moves directories at the depth openLevels up to
// the top and removes them from there.
type remover struct {
	ctx    context.Context
	top    *os.File
	lifted uint64
}

// empty removes the content of dir, which is at the given depth.
func (r *remover) empty(dir *os.File, level int) error {
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			if err := r.remove(dir, name, level); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		if len(names) == 0 {
			if err == io.EOF {
				return nil
			}
			return err
		}
		// Some filesystems skip entries when entries that were already read are deleted.
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
}

func (r *remover) remove(dir *os.File, name string, level int) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	sub, err := unlinkOrOpen(int(dir.Fd()), name)
	if sub == nil {
		return err
	}
	defer sub.Close()
	if level == openLevels {
		return r.lift(dir, name)
	}
	if err := r.empty(sub, level+1); err != nil {
		return err
	}
	return rmdir(int(dir.Fd()), name)
}

// lift moves a directory to the top, which is emptied later.
func (r *remover) lift(dir *os.File, name string) error {
	for {
		r.lifted++
		to := "lifted-" + strconv.FormatUint(r.lifted, 10)
		err := unix.Renameat2(int(dir.Fd()), name, int(r.top.Fd()), to, unix.RENAME_NOREPLACE)
		if !errors.Is(err, unix.EEXIST) {
			return os.NewSyscallError("renameat2", err)
		}
	}
}

// unlinkOrOpen removes name, or opens it if it is a directory.
func unlinkOrOpen(dir int, name string) (*os.File, error) {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil, nil
	}
	if err != unix.EISDIR && err != unix.EPERM {
		return nil, err
	}
	fd, openErr := openat2(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if errors.Is(openErr, unix.ENOTDIR) {
		return nil, err // the first error is the reason why the entry remains
	}
	if openErr != nil {
		return nil, openErr
	}
	return os.NewFile(uintptr(fd), name), nil
}

func rmdir(dir int, name string) error {
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}
