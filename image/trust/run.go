package trust

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/trust/worker"
	"berth/internal/jail"
)

// verifyTimeout limits a run of berth-verify, which takes milliseconds.
const verifyTimeout = time.Minute

// run starts berth-verify on a directory with the given files, and returns its verdict. An error
// means that there is no verdict.
func run(ctx context.Context, path string, content files) (worker.Verdict, error) {
	tree, err := content.mount()
	if err != nil {
		return worker.Verdict{}, err
	}
	defer tree.Close() // the kernel then drops the mount
	path, err = exec.LookPath(path)
	if err != nil {
		return worker.Verdict{}, err
	}
	exe, err := os.Open(path)
	if err != nil {
		return worker.Verdict{}, err
	}
	defer exe.Close() // read only
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	answer, err := jail.Run(ctx, jail.Command{Name: "berth-verify", Exe: exe, Version: worker.Version, Tree: tree},
		worker.MaxVerdict)
	if err != nil {
		return worker.Verdict{}, err
	}
	return worker.ParseVerdict(answer)
}

// mount writes the files to a new tmpfs without a mount point, and returns its root directory.
// Nothing remains of it when the daemon dies.
func (f files) mount() (_ *os.File, err error) {
	filesystem, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create filesystem for berth-verify: %w", err)
	}
	defer unix.Close(filesystem)
	for _, option := range [][2]string{{"mode", "0700"}, {"size", strconv.Itoa(maxTree)}} {
		if err := unix.FsconfigSetString(filesystem, option[0], option[1]); err != nil {
			return nil, fmt.Errorf("set option %s of filesystem for berth-verify: %w", option[0], err)
		}
	}
	if err := unix.FsconfigCreate(filesystem); err != nil {
		return nil, fmt.Errorf("create filesystem for berth-verify: %w", err)
	}
	fd, err := unix.Fsmount(filesystem, unix.FSMOUNT_CLOEXEC, jail.Attributes)
	if err != nil {
		return nil, fmt.Errorf("mount filesystem for berth-verify: %w", err)
	}
	tree := os.NewFile(uintptr(fd), "tree")
	defer func() {
		if err != nil {
			err = errors.Join(err, tree.Close())
		}
	}()
	for name, data := range f {
		if err := writeAt(fd, name, data); err != nil {
			return nil, fmt.Errorf("write %s for berth-verify: %w", name, err)
		}
	}
	return tree, nil
}

// maxTree limits all files for one run, in bytes.
const maxTree = 128 << 20

// writeAt writes a file below a directory. It makes the directory of the file, which is at most one
// level deep. Only the daemon has the filesystem, so there are no links to follow.
func writeAt(root int, name string, data []byte) error {
	if dir := path.Dir(name); dir != "." {
		if err := unix.Mkdirat(root, dir, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	fd, err := unix.Openat(root, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), filepath.Base(name))
	_, err = io.Copy(file, bytes.NewReader(data))
	return errors.Join(err, file.Close())
}
