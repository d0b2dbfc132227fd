// Package program starts programs that confine themselves with package jail, from the daemon's
// side.
//
// # Contract
//
// The program gets one directory as its only tree of files, at descriptor 3: a mount that is
// mounted nowhere and that the kernel drops with the last descriptor. It has namespaces of its own
// for processes, network and IPC, and an empty environment. It ends with the daemon. Its answer and
// its messages are limited. An answer comes from a program that has parsed hostile input, so the
// caller must decode it strictly.
package program

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/capture"
)

// Namespaces hide other processes, networks and IPC objects.
const Namespaces = unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWNET

// Attributes make devices, set-id bits and programs on a mount unusable.
const Attributes = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC

// Command is a run of a program.
type Command struct {
	Name      string // in errors
	Path      string
	Args      []string
	Tree      *os.File // the directory, on a mount of its own
	Input     []byte   // on standard input
	MaxOutput int      // bytes of the answer
	Timeout   time.Duration
}

// Run runs a program and returns its standard output. An error has the first line of its standard
// error.
func Run(ctx context.Context, c Command) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	out, err := capture.New(c.MaxOutput)
	if err != nil {
		return nil, err
	}
	var messages limitedBuffer
	cmd := exec.CommandContext(ctx, c.Path, c.Args...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = []string{}, "/", time.Second
	cmd.ExtraFiles = []*os.File{c.Tree}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(c.Input), out.File(), &messages
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: Namespaces, Setsid: true, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // the kernel kills the process when the starting thread ends
	err = cmd.Run()
	runtime.UnlockOSThread()
	if err := errors.Join(err, out.End()); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", c.Name, err, messages.firstLine())
	}
	return out.Bytes(), nil
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

// Clone clones the mount of dir as a mount that is mounted nowhere, with dir as its root. No path
// leads out of it.
func Clone(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", dir.Name(), err)
	}
	return os.NewFile(uintptr(fd), "tree"), nil
}

// Restrict gives a mount Attributes and more, such as MOUNT_ATTR_RDONLY. The error is ENOSYS before
// Linux 5.12.
func Restrict(mount *os.File, more uint64) error {
	attr := unix.MountAttr{Attr_set: more | Attributes}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("restrict mount: %w", err)
	}
	return nil
}
