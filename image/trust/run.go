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
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/trust/wire"
	"berth/internal/capture"
)

// verifyTimeout limits a run of berth-verify, which takes milliseconds.
const verifyTimeout = time.Minute

// namespaces hide other processes, networks and IPC objects.
const namespaces = unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWNET

// run starts berth-verify with a directory of the given files and returns its verdict. An error
// means that there is no verdict.
func run(ctx context.Context, program string, content files) (wire.Verdict, error) {
	tree, err := content.mount()
	if err != nil {
		return wire.Verdict{}, err
	}
	defer tree.Close() // the kernel then drops the mount
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	out, err := capture.New(wire.MaxVerdict)
	if err != nil {
		return wire.Verdict{}, err
	}
	var messages limitedBuffer
	cmd := exec.CommandContext(ctx, program, wire.Version)
	cmd.Env, cmd.Dir, cmd.WaitDelay = []string{}, "/", time.Second
	cmd.ExtraFiles = []*os.File{tree}
	cmd.Stdout, cmd.Stderr = out.File(), &messages
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Setsid: true, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // the kernel kills the process when the starting thread ends
	err = cmd.Run()
	runtime.UnlockOSThread()
	if err := errors.Join(err, out.End()); err != nil {
		return wire.Verdict{}, fmt.Errorf("berth-verify: %w: %s", err, messages.firstLine())
	}
	return wire.ParseVerdict(out.Bytes())
}

// limitedBuffer keeps the first bytes of its input.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	const limit = 512
	_, err := b.Buffer.Write(p[:min(len(p), limit-b.Len())])
	return len(p), err
}

func (b *limitedBuffer) firstLine() string {
	line, _, _ := bytes.Cut(b.Bytes(), []byte("\n"))
	return strconv.QuoteToASCII(string(line))
}

// mount writes the files to a new tmpfs that is mounted nowhere, and returns its root directory.
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
	const attributes = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC
	fd, err := unix.Fsmount(filesystem, unix.FSMOUNT_CLOEXEC, attributes)
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
