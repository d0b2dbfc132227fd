package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Disk is a small filesystem for directories of a daemon, which can be made full or
// read-only.
type Disk struct {
	Path    string // where it is mounted
	ballast string
}

// Kinds of disks.
const (
	Tmpfs = "tmpfs"
	Ext4  = "ext4" // on a loop device
)

// NewDisk mounts a disk of size bytes until the daemon has ended.
func NewDisk(t *testing.T, d *Daemon, name, kind string, size int64) *Disk {
	t.Helper()
	k := &Disk{Path: filepath.Join(d.Dir, name)}
	k.ballast = filepath.Join(k.Path, "ballast")
	Must(t, os.Mkdir(k.Path, 0o711))
	command := []string{"mount", "-t", "tmpfs", "-o", fmt.Sprintf("mode=0711,size=%d", size), "berth-test", k.Path}
	if kind == Ext4 {
		image := filepath.Join(t.TempDir(), name+".img")
		Must(t, os.WriteFile(image, nil, 0o600))
		Must(t, os.Truncate(image, size))
		RunCommand(t, "mkfs.ext4", "-q", "-m", "0", "-N", "2000", "-O", "^has_journal", image)
		command = []string{"mount", "-o", "loop", image, k.Path}
	}
	RunCommand(t, command...)
	d.Mounts = append(d.Mounts, k.Path)
	return k
}

// RunCommand runs a command, which must succeed.
func RunCommand(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// Fill leaves no byte free. It may be called while others write.
func (k *Disk) Fill(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(k.ballast, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	Must(t, ignoreErrno(err, unix.ENOSPC))
	if err != nil {
		return
	}
	defer f.Close()
	for chunk := 1 << 20; chunk > 0; chunk /= 2 {
		zeros := make([]byte, chunk)
		for err = nil; err == nil; {
			_, err = f.Write(zeros)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// FillInodes leaves room for bytes, but for no further file.
func (k *Disk) FillInodes(t *testing.T) {
	t.Helper()
	Must(t, os.MkdirAll(k.ballast, 0o700))
	for n := 0; ; n++ {
		f, err := os.Create(filepath.Join(k.ballast, fmt.Sprint(n)))
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		Must(t, err)
		Must(t, f.Close())
	}
}

// Empty takes away what Fill and FillInodes made.
func (k *Disk) Empty(t *testing.T) {
	t.Helper()
	Must(t, os.RemoveAll(k.ballast))
}

// ReadOnly makes dir of the disk read-only for everybody who opens anything there from now on, or
// takes that back. (The filesystem itself cannot be while somebody writes to it.)
func (k *Disk) ReadOnly(t *testing.T, dir string, readOnly bool) {
	t.Helper()
	if !readOnly {
		Must(t, unix.Unmount(dir, unix.MNT_DETACH)) // a daemon that was started meanwhile has files open there
		return
	}
	Must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	Must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}
