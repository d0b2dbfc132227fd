package blocklog

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Attached is a Disk that is attached to a loop device. This process serves the loop device's file
// through FUSE. Requests to the device become operations of the disk: a flush is an fsync of the
// file, and a write is answered once the disk contains it.
//
// To avoid a deadlock, the process must not map files of a filesystem on the device. Allocations
// must not wait for its writeback.
type Attached struct {
	// Path is the path of the block device.
	Path   string
	dir    string
	loop   *os.File
	server *fuse.Server
}

// Attach attaches a disk to a loop device. dir must be empty and belongs to the attachment until
// Detach. The error wraps fs.ErrNotExist if the kernel has no FUSE or no loop devices.
func Attach(d *Disk, dir string) (_ *Attached, err error) {
	a := &Attached{dir: filepath.Join(dir, "fuse"), Path: filepath.Join(dir, "device")}
	if err := os.Mkdir(a.dir, 0o700); err != nil {
		return nil, err
	}
	if a.server, err = serve(d, a.dir); err != nil {
		return nil, errors.Join(fmt.Errorf("serve the disk: %w", err), os.Remove(a.dir))
	}
	if err := a.setUpLoop(d.Size()); err != nil {
		return nil, errors.Join(fmt.Errorf("make a loop device of the disk: %w", err), a.stopServing())
	}
	return a, nil
}

// Idle returns an error while a filesystem of the device is mounted anywhere, or being unmounted.
func (a *Attached) Idle() error {
	fd, err := unix.Open(a.Path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open exclusively", Path: a.Path, Err: err}
	}
	return unix.Close(fd)
}

// Detach detaches the device. No filesystem of it may be mounted any more.
func (a *Attached) Detach() error {
	// The kernel detaches the file when the last descriptor is closed.
	err := errors.Join(a.loop.Close(), os.Remove(a.Path))
	return errors.Join(err, a.stopServing())
}

// stopServing unmounts the filesystem that serves the file, and waits for its server.
func (a *Attached) stopServing() error {
	if err := unix.Unmount(a.dir, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", a.dir, err)
	}
	a.server.Wait()
	return os.Remove(a.dir)
}

// setUpLoop finds a free loop device. It tries again if another process takes the device first.
func (a *Attached) setUpLoop(size int64) error {
	// Not os.Open, because the runtime's poller would ask this process for the file's readiness.
	fd, err := unix.Open(filepath.Join(a.dir, diskFile), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the served file: %w", err)
	}
	defer unix.Close(fd) // the loop device has its own reference
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return os.NewSyscallError("LOOP_CTL_GET_FREE", err)
		}
		err = a.configure(n, fd)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
}

// configure attaches the file to a loop device. It makes a device node, because a /dev that is no
// devtmpfs may lack one.
func (a *Attached) configure(number, file int) error {
	device, err := deviceNumber(number)
	if err != nil {
		return err
	}
	if err := unix.Mknod(a.Path, unix.S_IFBLK|0o600, int(device)); err != nil {
		return &os.PathError{Op: "mknod", Path: a.Path, Err: err}
	}
	loop, err := os.OpenFile(a.Path, os.O_RDWR, 0)
	if err == nil {
		config := unix.LoopConfig{Fd: uint32(file)}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR // also when this process is killed
		if err = unix.IoctlLoopConfigure(int(loop.Fd()), &config); err == nil {
			a.loop = loop
			return nil
		}
		err = errors.Join(os.NewSyscallError("LOOP_CONFIGURE", err), loop.Close())
	}
	return errors.Join(err, os.Remove(a.Path))
}

func deviceNumber(loop int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/sys/block/loop%d/dev", loop))
	if err != nil {
		return 0, err
	}
	majorText, minorText, _ := strings.Cut(strings.TrimSpace(string(text)), ":")
	major, err := strconv.ParseUint(majorText, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("device number of loop%d: %w", loop, err)
	}
	minor, err := strconv.ParseUint(minorText, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("device number of loop%d: %w", loop, err)
	}
	return unix.Mkdev(uint32(major), uint32(minor)), nil
}

// diskFile is the name of the only served file.
const diskFile = "disk"

// serve mounts a filesystem with the disk as its only file.
func serve(d *Disk, dir string) (*fuse.Server, error) {
	root := &rootNode{disk: d}
	forever := time.Hour // the size never changes
	server, err := fs.Mount(dir, root, &fs.Options{
		AttrTimeout: &forever, EntryTimeout: &forever,
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "blocklog", Name: "blocklog", MaxWrite: 512 << 10, DisableXAttrs: true},
	})
	if err != nil {
		return nil, err
	}
	if err := keepFromPrograms(); err != nil {
		return nil, errors.Join(err, server.Unmount())
	}
	return server, nil
}

// keepFromPrograms makes programs that this process starts not inherit its descriptor of /dev/fuse,
// which go-fuse opens without O_CLOEXEC. A daemon with it keeps the kernel waiting for answers when
// this process is killed, so neither its own fsync nor the loop device ends.
func keepFromPrograms() error {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join(dir, e.Name())); err != nil || target != "/dev/fuse" {
			continue // os.ReadDir's own descriptor is closed
		}
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return err
		}
		unix.CloseOnExec(fd)
	}
	return nil
}

type rootNode struct {
	fs.Inode
	disk *Disk
}

var _ fs.NodeOnAdder = (*rootNode)(nil)

// OnAdd implements fs.NodeOnAdder.
func (r *rootNode) OnAdd(ctx context.Context) {
	r.AddChild(diskFile, r.NewPersistentInode(ctx, &diskNode{disk: r.disk}, fs.StableAttr{Mode: fuse.S_IFREG}), false)
}

// diskNode is the loop device's file. Each request becomes an operation of the disk before the
// answer.
type diskNode struct {
	fs.Inode
	disk *Disk
}

var _ interface {
	fs.NodeGetattrer
	fs.NodeOpener
	fs.NodeReader
	fs.NodeWriter
	fs.NodeFsyncer
	fs.NodeAllocater
} = (*diskNode)(nil)

// Getattr implements fs.NodeGetattrer.
func (n *diskNode) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size = fuse.S_IFREG|0o600, uint64(n.disk.Size())
	return fs.OK
}

// Open implements fs.NodeOpener. It bypasses the page cache, so that an acknowledged write is in
// the log.
func (n *diskNode) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, fs.OK
}

// Read implements fs.NodeReader.
func (n *diskNode) Read(_ context.Context, _ fs.FileHandle, dest []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	dest = dest[:max(0, min(int64(len(dest)), n.disk.Size()-offset))]
	if _, err := n.disk.ReadAt(dest, offset); err != nil {
		return nil, syscall.EIO
	}
	return fuse.ReadResultData(dest), fs.OK
}

// Write implements fs.NodeWriter.
func (n *diskNode) Write(_ context.Context, _ fs.FileHandle, data []byte, offset int64) (uint32, syscall.Errno) {
	written, err := n.disk.WriteAt(data, offset)
	if err != nil {
		return 0, syscall.EIO
	}
	return uint32(written), fs.OK
}

// Fsync implements fs.NodeFsyncer. It is the loop device's flush.
func (n *diskNode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	n.disk.Flush()
	return fs.OK
}

// Allocate implements fs.NodeAllocater. It is the loop device's discard and its write of zeros.
func (n *diskNode) Allocate(_ context.Context, _ fs.FileHandle, offset, size uint64, mode uint32) syscall.Errno {
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) == 0 {
		return syscall.EOPNOTSUPP
	}
	if err := n.disk.Discard(int64(offset), int64(size)); err != nil {
		return syscall.EINVAL
	}
	return fs.OK
}
