package jail

import "golang.org/x/sys/unix"

// auditArch is AUDIT_ARCH_* by GOARCH (linux/audit.h).
var auditArch = map[string]uint32{"amd64": 0xc000003e, "arm64": 0xc00000b7}

// always are the allowed system calls. A call that is missing in the list fails with EPERM, and the
// layer fails too. Run TestEveryKind after each upgrade of Go.
var always = []uint32{
	// Go's runtime: memory, threads, signals, time.
	unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MPROTECT, unix.SYS_MADVISE, unix.SYS_MINCORE, unix.SYS_BRK,
	unix.SYS_FUTEX, unix.SYS_GETTID, unix.SYS_GETPID, unix.SYS_TGKILL, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_RESTART_SYSCALL,
	unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_GETRANDOM, unix.SYS_SET_ROBUST_LIST, unix.SYS_RSEQ,
	unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	// Its poller.
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PIPE2, unix.SYS_FCNTL,
	// Open files.
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_LSEEK, unix.SYS_CLOSE, unix.SYS_FSTAT, unix.SYS_FTRUNCATE,
}

// files are the additional system calls for creating files.
var files = []uint32{
	unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_GETDENTS64, unix.SYS_READLINKAT, unix.SYS_FALLOCATE, unix.SYS_FSTATFS,
	unix.SYS_MKDIRAT, unix.SYS_MKNODAT, unix.SYS_SYMLINKAT, unix.SYS_LINKAT, unix.SYS_UNLINKAT,
	unix.SYS_FCHOWN, unix.SYS_FCHOWNAT, unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_UTIMENSAT, unix.SYS_FSETXATTR, unix.SYS_SETXATTR, unix.SYS_LSETXATTR,
	fstatat,
}

// reads are the additional system calls for reading files.
var reads = []uint32{unix.SYS_OPENAT, unix.SYS_READLINKAT, unix.SYS_GETDENTS64, fstatat}

// Offsets in struct seccomp_data.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArg0   = 16 // the lower half of the argument, because these machines are little-endian
)

// filter is the BPF program. It checks the architecture and allows the listed calls, clone(2) for
// threads only, and prctl(2) only to name memory.
func filter(arch uint32, calls []uint32) []unix.SockFilter {
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		has   = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		least = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		ret   = unix.BPF_RET | unix.BPF_K
	)
	const x32 = 0x40000000 // bit of the other ABI of amd64
	allow, refuse := uint32(unix.SECCOMP_RET_ALLOW), uint32(unix.SECCOMP_RET_ERRNO)|uint32(unix.EPERM)
	missing := uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.ENOSYS)
	program := []unix.SockFilter{
		{Code: load, K: offsetArch},
		{Code: equal, K: arch, Jt: 1},
		{Code: ret, K: unix.SECCOMP_RET_KILL_PROCESS},
		{Code: load, K: offsetNumber},
		{Code: least, K: x32, Jf: 1},
		{Code: ret, K: refuse},
		// The flags of clone3(2) are in memory, which a filter cannot read. If it fails, glibc
		// makes threads with clone(2).
		{Code: equal, K: unix.SYS_CLONE3, Jf: 1},
		{Code: ret, K: missing},
	}
	for _, c := range []struct {
		call uint32
		test uint16
		arg0 uint32
	}{{unix.SYS_CLONE, has, unix.CLONE_THREAD}, {unix.SYS_PRCTL, equal, unix.PR_SET_VMA}} {
		program = append(program,
			unix.SockFilter{Code: equal, K: c.call, Jf: 3},
			unix.SockFilter{Code: load, K: offsetArg0},
			unix.SockFilter{Code: c.test, K: c.arg0, Jf: 1},
			unix.SockFilter{Code: ret, K: allow},
			unix.SockFilter{Code: load, K: offsetNumber}, // again
		)
	}
	for _, call := range calls {
		program = append(program, unix.SockFilter{Code: equal, K: call, Jf: 1}, unix.SockFilter{Code: ret, K: allow})
	}
	return append(program, unix.SockFilter{Code: ret, K: refuse})
}
