// Command neighbour is a pod's program that attacks the node's runtime without any privilege. Its
// argument names the attack. It prints "ready" once the attack runs and goes on until it is killed.
//
// It is built without cgo, so that it runs in an image without a C library.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attacks maps names to attacks. Each function returns once its attack runs, or an error if the
// attack is impossible.
var attacks = map[string]func() error{
	"environ":     hugeEnvironment,
	"no-environ":  emptyEnvironments,
	"arguments":   hugeArguments,
	"connections": idleConnections,
	"trace":       traceAll,
	"inotify":     exhaustInotify,
	"pipes":       fillPipes,
	"deep":        deepTrees,
	"forks":       forkStorm,
	"mounts":      manyMounts,
	"names":       shimNames,
	"files":       growNodeFiles,
}

func main() {
	attack, ok := attacks[os.Args[1]]
	if !ok {
		attack, ok = children[os.Args[1]]
	}
	if !ok {
		fail(fmt.Errorf("unknown attack %q", os.Args[1]))
	}
	if err := attack(); err != nil {
		fail(err)
	}
	fmt.Println("ready")
	rest()
}

// rest blocks forever. It does not use an empty select, which the Go runtime reports as a deadlock.
func rest() {
	for {
		_ = unix.Pause() // Pause returns after a handled signal
	}
}

// children are the subcommands that attacks start.
var children = map[string]func() error{
	"idle-child":    func() error { rest(); return nil },
	"environ-child": func() error { return moveEnvironment(1 << 30) },
	"empty-child":   func() error { return moveEnvironment(0) },
}

func fail(err error) {
	fmt.Println("failed:", err)
	os.Exit(1)
}

// start starts a subcommand of this program. The child lives until the container ends.
func start(child string, args ...string) error {
	cmd := exec.Command("/proc/self/exe", append([]string{child}, args...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", child, err)
	}
	if child == "idle-child" {
		return nil
	}
	line := make([]byte, 64)
	n, err := out.Read(line)
	if !strings.HasPrefix(string(line[:n]), "ready") {
		return fmt.Errorf("%s said %q: %w", child, line[:n], err)
	}
	return nil
}

// memoryMap is struct prctl_mm_map of prctl(2), PR_SET_MM_MAP.
type memoryMap struct {
	startCode, endCode, startData, endData, startBrk, brk uint64
	startStack, argStart, argEnd, envStart, envEnd        uint64
	auxv                                                  uint64
	auxvSize, exeFd                                       uint32
}

// moveEnvironment makes the kernel show other memory as this process's environment: size bytes that
// were never touched. It needs no privilege (Linux 4.10, CONFIG_CHECKPOINT_RESTORE).
func moveEnvironment(size int) error {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	field := func(n int) uint64 { v, _ := strconv.ParseUint(fields[n-3], 10, 64); return v }
	brk, _, _ := unix.Syscall(unix.SYS_BRK, 0, 0, 0)
	m := memoryMap{startCode: field(26), endCode: field(27), startData: field(45), endData: field(46), startBrk: field(47), brk: uint64(brk),
		startStack: field(28), argStart: field(48), argEnd: field(49), exeFd: ^uint32(0)}
	area, err := unix.Mmap(-1, 0, max(size, os.Getpagesize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", size, err)
	}
	m.envStart = uint64(uintptr(unsafe.Pointer(&area[0])))
	m.envEnd = m.envStart + uint64(size)
	return unix.Prctl(unix.PR_SET_MM, unix.PR_SET_MM_MAP, uintptr(unsafe.Pointer(&m)), unsafe.Sizeof(m), 0)
}

func hugeEnvironment() error {
	for range 4 {
		if err := start("environ-child"); err != nil {
			return err
		}
	}
	return nil
}

func emptyEnvironments() error {
	for range 100 {
		if err := start("empty-child"); err != nil {
			return err
		}
	}
	return nil
}

// hugeArguments starts processes with the longest command line that the kernel allows: 128 KiB an
// argument.
func hugeArguments() error {
	args := make([]string, 12)
	for i := range args {
		args[i] = strings.Repeat("x", 128<<10-1)
	}
	for range 20 {
		if err := start("idle-child", args...); err != nil {
			return err
		}
	}
	return nil
}

// idleConnections opens as many connections to an address as its descriptors allow and sends
// nothing. It replaces connections that the other side closes.
func idleConnections() error {
	address := os.Args[2]
	const workers = 4
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	each := int(min(limit.Cur, 8000)-100) / workers
	for range workers {
		go func() {
			var open []net.Conn
			for {
				conn, err := net.DialTimeout("tcp", address, time.Second)
				if err != nil {
					time.Sleep(time.Millisecond) // the listener's queue is full
					continue
				}
				if open = append(open, conn); len(open) > each {
					_ = open[0].Close()
					open = open[1:]
				}
			}
		}()
	}
	return nil
}

// traceAll traces every process that it sees and never waits for one. The kernel does not report a
// traced process's exit to its parent.
func traceAll() error {
	go func() {
		runtime.LockOSThread()
		for {
			names, _ := filepath.Glob("/proc/[0-9]*")
			for _, name := range names {
				if pid, err := strconv.Atoi(filepath.Base(name)); err == nil && pid != os.Getpid() {
					_, _, _ = unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, 0, 0, 0)
				}
			}
			time.Sleep(time.Millisecond)
		}
	}()
	return nil
}

// exhaustInotify uses up the user's inotify instances and adds watches to each.
func exhaustInotify() error {
	for n := 0; ; n++ {
		fd, err := unix.InotifyInit1(0)
		if errors.Is(err, unix.EMFILE) && n > 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("instance %d: %w", n, err)
		}
		if _, err := unix.InotifyAddWatch(fd, "/", unix.IN_ALL_EVENTS); err != nil && !errors.Is(err, unix.ENOSPC) {
			return err
		}
	}
}

// fillPipes uses up the user's pipe memory (pipe-user-pages-soft) and keeps the pipes full.
func fillPipes() error {
	for n := range 2000 {
		var fds [2]int
		if err := unix.Pipe2(fds[:], unix.O_NONBLOCK); err != nil {
			if n > 0 {
				return nil
			}
			return err
		}
		_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, 1<<20)
		for {
			if _, err := unix.Write(fds[1], make([]byte, 64<<10)); err != nil {
				break
			}
		}
	}
	return nil
}

// deepTrees creates trees that are deeper than the longest path, with a file at each end, and moves
// their parts around.
func deepTrees() error {
	top, err := os.MkdirTemp("/tmp", "deep")
	if err != nil {
		return err
	}
	if err := os.Chdir(top); err != nil {
		return err
	}
	for tree := range 50 {
		if err := os.Chdir(top); err != nil {
			return err
		}
		for level := range 300 {
			name := fmt.Sprintf("%d-%d", tree, level)
			if err := errors.Join(os.Mkdir(name, 0o755), os.Chdir(name)); err != nil {
				return err
			}
		}
		if err := os.WriteFile("file", make([]byte, 64<<10), 0o644); err != nil {
			return err
		}
	}
	go func() {
		for i := 0; ; i++ {
			from, to := fmt.Sprintf("%s/%d-0/%d-1", top, i%50, i%50), fmt.Sprintf("%s/moved-%d", top, i%50)
			_ = os.Rename(from, to)
			_ = os.Rename(to, from)
		}
	}()
	return os.Chdir("/")
}

// forkStorm starts processes that exit at once, from several threads.
func forkStorm() error {
	for range 4 {
		go func() {
			for {
				_ = exec.Command("/bin/true").Run()
			}
		}()
	}
	return nil
}

// manyMounts makes 10,000 mounts in a new user namespace.
func manyMounts() error {
	if os.Args[len(os.Args)-1] != "inside" {
		cmd := exec.Command("/proc/self/exe", os.Args[1], "inside")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}}
		cmd.Stdout = os.Stdout
		err := cmd.Run()
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
			fmt.Println("refused:", err) // refused by a security module
			return nil
		}
		return err
	}
	err := unix.Mount("none", "/tmp", "tmpfs", 0, "size=1m")
	if errors.Is(err, unix.EACCES) {
		fmt.Println("refused:", err) // refused by a security module
		return nil
	}
	if err != nil {
		return fmt.Errorf("mount /tmp: %w", err)
	}
	for n := range 10000 {
		if err := unix.Mount("none", "/tmp", "tmpfs", 0, "size=4k,nr_inodes=2"); err != nil {
			if n > 1000 && errors.Is(err, unix.ENOSPC) { // fs.mount-max
				return nil
			}
			return fmt.Errorf("mount %d: %w", n, err)
		}
	}
	return nil
}

// shimNames starts processes with the names, arguments and programs of berth's processes.
func shimNames() error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	fd, err := unix.MemfdCreate("berth-shim", 0)
	if err != nil {
		return err
	}
	if _, err := unix.Write(fd, self); err != nil {
		return err
	}
	for range 10 {
		cmd := exec.Command(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), "idle-child")
		cmd.Args[0] = "berth-shim"
		if err := cmd.Start(); err != nil {
			return fmt.Errorf("execute memfd: %w", err)
		}
	}
	return nil
}

// growNodeFiles writes to the files that the runtime mounts into each container until the disk is
// full.
func growNodeFiles() error {
	block := make([]byte, 1<<20)
	for _, name := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"} {
		file, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			continue // this user may not write
		}
		for range 64 {
			if _, err := file.Write(block); err != nil {
				break
			}
		}
		if err := file.Close(); err != nil {
			return err
		}
	}
	return nil
}
