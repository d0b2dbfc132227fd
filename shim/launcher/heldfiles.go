package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/shim/proto"
)

// fileGate refuses restored processes that hold files outside their container: open files, the
// working and root directories, the program and mapped files. CRIU opens the paths of a checkpoint
// as root. A symbolic link that a container made since can lead it out, because restoring processes
// hold a descriptor of the node's /proc.
//
// A file is in the container if its mount is. So the gate compares the mount of each file with the
// mounts of the process's mount namespace. It permits the kernel's own mounts too: those of pipes,
// sockets, anonymous inodes and memfds, which have no paths. Other files must be the launcher's:
// null devices as streams.
type fileGate struct {
	mounts     map[string]map[uint64]bool // IDs by mount namespace
	inside     map[string]int             // a process in each of these namespaces
	kernel     map[uint64]bool            // IDs of mounts that are in no mount namespace
	rare       bool                       // kernel includes the mounts of rareKernelMounts
	nsfs       uint64                     // ID of the mount of namespaces
	streams    map[heldFile]bool          // what the launcher has supplied
	nodes      map[string]bool            // mount namespaces of the launcher and CRIU
	namespaces map[string]bool            // of the restored processes, by the text of their links
}

// heldFile identifies a file and its mount.
type heldFile struct{ mount, inode uint64 }

// namespaceKinds are the names in /proc/PID/ns of what a descriptor may refer to.
var namespaceKinds = []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"}

// newFileGate prepares the comparison of the processes pids, which criu has restored. streams are
// the container's ends of the launcher's streams.
func newFileGate(pids []int, criu int, streams []*os.File) (*fileGate, error) {
	g := &fileGate{mounts: map[string]map[uint64]bool{}, inside: map[string]int{}, streams: map[heldFile]bool{},
		namespaces: map[string]bool{}}
	var err error
	if g.kernel, err = kernelMounts(); err != nil {
		return nil, fmt.Errorf("find the kernel's mounts: %w", err)
	}
	if g.nsfs, err = mountOf("/proc/self/ns/mnt"); err != nil {
		return nil, err
	}
	for _, f := range streams {
		held, _, err := statHeld(int(f.Fd()), "", unix.AT_EMPTY_PATH)
		if err != nil {
			return nil, err
		}
		g.streams[held] = true
	}
	if g.nodes, err = nodeNamespaces(criu); err != nil {
		return nil, err
	}
	for _, pid := range pids {
		if pid == criu {
			continue
		}
		for _, kind := range namespaceKinds {
			if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind)); err == nil { // none in a zombie
				g.namespaces[link] = true
			}
		}
	}
	return g, nil
}

// nodeNamespaces returns the mount namespaces of this process and of CRIU.
func nodeNamespaces(criu int) (map[string]bool, error) {
	namespaces := map[string]bool{}
	for _, pid := range []int{os.Getpid(), criu} {
		namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		if err != nil {
			return nil, err
		}
		namespaces[namespace] = true
	}
	return namespaces, nil
}

// check refuses a process that holds a file outside its container. The process must not run
// meanwhile.
func (g *fileGate) check(pid int) error {
	dir := fmt.Sprintf("/proc/%d", pid)
	if isZombie(pid) {
		threads, err := os.ReadDir(dir + "/task")
		if err == nil && len(threads) != 1 { // the others would hold files
			err = proto.Errorf(proto.FailedPrecondition, "the first thread of restored process %d has ended", pid)
		}
		return err
	}
	namespace, err := os.Readlink(dir + "/ns/mnt")
	if err != nil {
		return fmt.Errorf("mount namespace of restored process %d: %w", pid, err)
	}
	if g.nodes[namespace] {
		return proto.Errorf(proto.FailedPrecondition, "restored process %d is in the node's mount namespace", pid)
	}
	if g.mounts[namespace] == nil {
		if g.mounts[namespace], err = mountsOf(pid); err != nil {
			return fmt.Errorf("mounts of restored process %d: %w", pid, err)
		}
		g.inside[namespace] = pid
	}
	held := []string{"cwd", "root", "exe"}
	for _, list := range []string{"fd", "map_files"} {
		entries, err := os.ReadDir(dir + "/" + list)
		if err != nil {
			return fmt.Errorf("files of restored process %d: %w", pid, err)
		}
		for _, e := range entries {
			held = append(held, list+"/"+e.Name())
		}
	}
	for _, name := range held {
		if err := g.checkFile(dir, name, g.mounts[namespace]); err != nil {
			return fmt.Errorf("restored process %d: %w", pid, err)
		}
	}
	return nil
}

// checkFile checks one file by its link in the directory of a process.
func (g *fileGate) checkFile(dir, name string, mounts map[uint64]bool) error {
	file, st, err := statHeld(unix.AT_FDCWD, dir+"/"+name, 0)
	if err != nil {
		return err
	}
	if mounts[file.mount] {
		return nil
	}
	target, err := os.Readlink(dir + "/" + name)
	if err != nil {
		return err
	}
	switch number, isOpen := strings.CutPrefix(name, "fd/"); {
	case file.mount == g.nsfs && g.namespaces[target]:
		return nil
	case file.mount == g.nsfs:
	case g.kernel[file.mount]:
		return nil
	case isOpen && (number == "0" || number == "1" || number == "2") && g.streams[file]:
		return nil
	case !g.rare:
		if err := g.addRare(); err != nil {
			return fmt.Errorf("find the kernel's mounts: %w", err)
		}
		return g.checkFile(dir, name, mounts)
	}
	return proto.Errorf(proto.FailedPrecondition, "%s is outside its container: %q of type %o on the mount %d", name, target,
		st.Mode&unix.S_IFMT, file.mount)
}

// statHeld returns the identity of a file. It waits for no remote filesystem.
func statHeld(dir int, path string, flags int) (heldFile, *unix.Statx_t, error) {
	var st unix.Statx_t
	flags |= unix.AT_STATX_DONT_SYNC | unix.AT_NO_AUTOMOUNT
	if err := unix.Statx(dir, path, flags, unix.STATX_TYPE|unix.STATX_INO|unix.STATX_MNT_ID, &st); err != nil {
		return heldFile{}, nil, fmt.Errorf("statx %s: %w", path, err)
	}
	if st.Mask&unix.STATX_MNT_ID == 0 {
		return heldFile{}, nil, fmt.Errorf("statx %s: the kernel does not tell the mount", path)
	}
	return heldFile{st.Mnt_id, st.Ino}, &st, nil
}

func mountOf(path string) (uint64, error) {
	file, _, err := statHeld(unix.AT_FDCWD, path, 0)
	return file.mount, err
}

// mountsOf returns the IDs of all mounts in a process's mount namespace.
func mountsOf(pid int) (map[uint64]bool, error) {
	ids := map[uint64]bool{}
	err := inMounts(pid, func(mounts []*mountinfo.Info) error {
		for _, m := range mounts {
			ids[uint64(m.ID)] = true
		}
		return nil
	})
	return ids, err
}

// inMounts calls do in the mount namespace of a process, with its mounts, on a thread that ends
// afterwards. The table in the process's own /proc directory has only the mounts below the root of
// that process.
func inMounts(pid int, do func([]*mountinfo.Info) error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer namespace.Close() // a namespace
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends: others must not use it
		done <- func() error {
			self, err := os.Open("/proc/thread-self") // the namespace has another /proc
			if err != nil {
				return err
			}
			defer self.Close() // it was only read
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return os.NewSyscallError("unshare", err)
			}
			if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
				return os.NewSyscallError("setns", err)
			}
			fd, err := unix.Openat(int(self.Fd()), "mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return os.NewSyscallError("openat", err)
			}
			table := os.NewFile(uintptr(fd), "mountinfo")
			defer table.Close() // it was only read
			mounts, err := mountinfo.GetMountsFromReader(table, nil)
			if err != nil {
				return err
			}
			return do(mounts)
		}()
	}()
	return <-done
}

// kernelMounts returns the IDs of the kernel's own mounts of pipes, sockets, anonymous inodes,
// shared memory and, since Linux 6.9, pidfds. It makes a file on each.
func kernelMounts() (map[uint64]bool, error) {
	ids := map[uint64]bool{}
	for _, open := range []func() (int, error){
		func() (int, error) {
			var ends [2]int
			err := unix.Pipe2(ends[:], unix.O_CLOEXEC)
			if err == nil {
				err = unix.Close(ends[1])
			}
			return ends[0], err
		},
		func() (int, error) { return unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) },
		func() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC) },
		func() (int, error) { return unix.MemfdCreate("", unix.MFD_CLOEXEC) },
		func() (int, error) { return unix.PidfdOpen(os.Getpid(), 0) },
	} {
		if err := addMountOf(ids, open); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// addMountOf adds the ID of the mount of a file that open makes.
func addMountOf(ids map[uint64]bool, open func() (int, error)) error {
	fd, err := open()
	if err != nil {
		return err
	}
	file, _, err := statHeld(fd, "", unix.AT_EMPTY_PATH)
	if err == nil {
		ids[file.mount] = true
	}
	return errors.Join(err, unix.Close(fd))
}

// hugePages has a directory for each size of huge pages that the kernel supports.
const hugePages = "/sys/kernel/mm/hugepages"

// addRare adds the kernel's mounts of huge pages, one for each size, and of the rings of
// io_setup(2).
func (g *fileGate) addRare() error {
	g.rare = true
	sizes, err := os.ReadDir(hugePages)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range sizes {
		var kilobytes uint64
		if _, err := fmt.Sscanf(e.Name(), "hugepages-%dkB", &kilobytes); err != nil {
			continue
		}
		const shift = 26 // MFD_HUGE_SHIFT (memfd_create(2))
		size := bits.TrailingZeros64(kilobytes << 10)
		err := addMountOf(g.kernel, func() (int, error) {
			return unix.MemfdCreate("", unix.MFD_CLOEXEC|unix.MFD_HUGETLB|size<<shift)
		})
		if err != nil {
			return err
		}
	}
	return g.addRing()
}

// addRing adds the mount of a ring of io_setup(2). The ring is a mapping.
func (g *fileGate) addRing() error {
	var ring uintptr
	_, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1, uintptr(unsafe.Pointer(&ring)), 0)
	if errno == unix.ENOSYS {
		return nil
	}
	if errno != 0 {
		return os.NewSyscallError("io_setup", errno)
	}
	defer unix.Syscall(unix.SYS_IO_DESTROY, ring, 0, 0) //nolint:errcheck // it fails only for another address
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		var start, end uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &start, &end); err == nil && start == uint64(ring) {
			id, err := mountOf(fmt.Sprintf("/proc/self/map_files/%x-%x", start, end))
			if err != nil {
				return err
			}
			g.kernel[id] = true
			return nil
		}
	}
	return errors.New("the mapping of io_setup is not in /proc/self/maps")
}
