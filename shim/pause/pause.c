/*
 * pause holds a pod's namespaces. Where the pod shares its PID namespace, it is process 1 there and
 * reaps orphans. It exits on SIGTERM and SIGINT.
 *
 * "pause enter ..." makes these namespaces first, see enter(). It replaces libcontainer's init,
 * without the parts that only containers need (/proc, /dev, a spec) and without the start of a Go
 * program.
 *
 * It uses no C library, so that a pod takes a few pages of memory.
 */
#include <asm/errno.h>
#include <asm/fcntl.h>
#include <asm/signal.h>
#include <asm/unistd.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/keyctl.h>
#include <linux/mount.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>

#define BIT(sig) (1UL << ((sig)-1))
#define WNOHANG 1
#define MNT_DETACH 2

#if defined(__x86_64__)
#define OWN_ARCH AUDIT_ARCH_X86_64
__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");

static long syscall5(long nr, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long ret;
	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return ret;
}
#elif defined(__aarch64__)
#define OWN_ARCH AUDIT_ARCH_AARCH64
__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x0, sp\n\tbl begin\n");

static long syscall5(long nr, long a, long b, long c, long d, long e)
{
	register long x8 __asm__("x8") = nr;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
	return x0;
}
#else
#error "pause knows the system calls of x86_64 and aarch64 only"
#endif

#define SYSCALL(nr, a, b, c, d, e) syscall5(__NR_##nr, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e))

__attribute__((noreturn)) static void leave(int status)
{
	SYSCALL(exit_group, status, 0, 0, 0, 0);
	__builtin_trap(); /* a seccomp profile denies it */
}

/* hold is pause's work in its pod. The filter of enter() allows its system calls. */
__attribute__((noreturn)) static void hold(void)
{
	/* rt_sigtimedwait receives blocked signals, in process 1, too. */
	unsigned long set = BIT(SIGTERM) | BIT(SIGINT) | BIT(SIGCHLD);
	long sig;

	SYSCALL(rt_sigprocmask, SIG_BLOCK, &set, 0, sizeof(set), 0);
	do {
		while (SYSCALL(wait4, -1, 0, WNOHANG, 0, 0) > 0)
			;
		sig = SYSCALL(rt_sigtimedwait, &set, 0, 0, sizeof(set), 0);
	} while (sig == SIGCHLD || sig == -EINTR || sig == -EAGAIN);
	leave(sig < 0); /* a seccomp profile denies the wait; exit, because this would be a busy loop */
}

/*
 * Messages between the launcher and the two stages of enter(), in packets. An end of file means
 * that the launcher has ended. Then both stages exit.
 */
enum {
	PARENT_FD = 3, /* of the first stage */
	CHILD_FD = 4,  /* of the second */
	NETNS_FD = 5,  /* the network namespace to join, if flags has CLONE_NEWNET */
};

/* A report is a failed step with its errno, or a success. shim/launcher/pause.go has the same
 * list. */
enum step {
	STARTED, /* value is the second stage's PID */
	READY,
	CLONE,
	SETNS,
	SYSCTL, /* the first of them is SYSCTL+0x100, the second SYSCTL+0x200, ... */
	PROPAGATION,
	ROOT,
	PIVOT,
	HOSTNAME,
	KEYRING,
	GROUPS,
	CAPABILITIES,
	USER,
	NO_NEW_PRIVILEGES,
	FILTER,
	CGROUP, /* of the first stage */
	EXEC,
};

struct report {
	int step, value;
};

static long report(int fd, int step, long value)
{
	struct report r = {step, (int)value};

	return SYSCALL(write, fd, &r, sizeof(r), 0, 0);
}

/* must exits if a step of the second stage has failed. */
static long must(int step, long ret)
{
	if (ret < 0) {
		report(CHILD_FD, step, -ret);
		leave(1);
	}
	return ret;
}

/* await waits for the launcher's next message and returns it, 0 if the launcher is gone. */
static char await(int fd)
{
	char word;

	return SYSCALL(read, fd, &word, 1, 0, 0) == 1 ? word : 0;
}

static size_t length(const char *s)
{
	size_t n = 0;

	while (s[n])
		n++;
	return n;
}

/* number parses a decimal number, and moves *s behind it and a comma. */
static unsigned long number(const char **s)
{
	unsigned long n = 0;

	while (**s >= '0' && **s <= '9')
		n = 10 * n + (unsigned long)(*(*s)++ - '0');
	if (**s == ',')
		(*s)++;
	return n;
}

static void set_sysctls(char **pairs)
{
	for (int step = SYSCTL + 0x100; pairs[0]; pairs += 2, step += 0x100) {
		size_t n = length(pairs[1]);
		long fd = must(step, SYSCALL(openat, -1, pairs[0], O_WRONLY | O_CLOEXEC, 0, 0));

		must(step, SYSCALL(write, fd, pairs[1], n, 0, 0));
		SYSCALL(close, fd, 0, 0, 0, 0);
	}
}

/* enter_root makes a read-only mount of dir the root directory, and the only mount. */
static void enter_root(const char *dir)
{
	const unsigned long flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV;

	must(PROPAGATION, SYSCALL(mount, 0, "/", 0, MS_REC | MS_PRIVATE, 0));
	must(ROOT, SYSCALL(mount, dir, dir, 0, MS_BIND, 0));
	must(ROOT, SYSCALL(mount, 0, dir, 0, flags, 0));
	must(ROOT, SYSCALL(chdir, dir, 0, 0, 0, 0));
	/* This stacks the old root on the new one, without a directory for it: pivot_root(2). */
	must(PIVOT, SYSCALL(pivot_root, ".", ".", 0, 0, 0));
	must(PIVOT, SYSCALL(umount2, ".", MNT_DETACH, 0, 0, 0));
	must(PIVOT, SYSCALL(chdir, "/", 0, 0, 0, 0));
}

/* join_keyring replaces the host's session keyring. */
static void join_keyring(void)
{
	long ret = SYSCALL(keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0);

	if (ret != -ENOSYS) /* the kernel has no keys */
		must(KEYRING, ret);
}

static void become(unsigned long uid, unsigned long gid, const char *groups)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct none[2];
	unsigned int list[64];
	size_t n = 0;
	long ret;

	while (*groups && n < sizeof(list) / sizeof(list[0]))
		list[n++] = (unsigned int)number(&groups);
	must(GROUPS, SYSCALL(setgroups, n, list, 0, 0, 0));

	for (int c = 0; (ret = SYSCALL(prctl, PR_CAPBSET_DROP, c, 0, 0, 0)) == 0; c++)
		;
	if (ret != -EINVAL) /* the first unknown capability */
		must(CAPABILITIES, ret);
	must(USER, SYSCALL(setresgid, gid, gid, gid, 0, 0));
	must(USER, SYSCALL(setresuid, uid, uid, uid, 0, 0));
	for (int i = 0; i < 2; i++)
		none[i].effective = none[i].permitted = none[i].inheritable = 0;
	must(CAPABILITIES, SYSCALL(prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
	must(CAPABILITIES, SYSCALL(capset, &header, none, 0, 0, 0));
}

/*
 * filter allows the system calls of hold() and those before it. The launcher uses this filter if
 * the pod's profile also allows these calls. So the filter is at least as strict as the profile.
 */
static void filter(void)
{
#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
	static const struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OWN_ARCH, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(rt_sigtimedwait),
		ALLOW(wait4),
		ALLOW(rt_sigprocmask),
		ALLOW(restart_syscall),
		ALLOW(exit_group),
		ALLOW(execve),
		ALLOW(write), /* to report that execve has failed */
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
	};
	struct sock_fprog program = {sizeof(code) / sizeof(code[0]), (struct sock_filter *)code};

	must(FILTER, SYSCALL(seccomp, SECCOMP_SET_MODE_FILTER, 0, &program, 0, 0));
}

/* enter()'s arguments. */
enum {
	FLAGS = 2, /* CLONE_NEW* */
	DIR,       /* the root directory, with the program pause in it */
	NAME,      /* hostname; empty: no change */
	UID,
	GID,
	GROUP_LIST, /* separated by commas */
	MODE,       /* "n": no new privileges, "f": also a filter of system calls, else: neither */
	CGROUPS,    /* number of files that follow */
	REST,       /* files of cgroups to join, see join_cgroups; then sysctls: path and value of each */
};

/*
 * join_cgroups joins the cgroups of these files, "tasks" of cgroup v1. Other moves need a lock
 * against all forks and exits of the machine, for which they wait 5 to 15 ms. A process with one
 * thread that moves itself does not need this lock (Linux 5.5, internal/cgroup/anchor.go). A
 * leading "-" marks a file that may fail.
 */
static long join_cgroups(char **files, unsigned long n)
{
	for (; n > 0; n--, files++) {
		int optional = files[0][0] == '-';
		long fd = SYSCALL(openat, -1, files[0] + optional, O_WRONLY | O_CLOEXEC, 0, 0);
		long ret = fd < 0 ? fd : SYSCALL(write, fd, "0", 1, 0, 0);

		if (ret < 0 && !optional)
			return ret;
		if (fd >= 0)
			SYSCALL(close, fd, 0, 0, 0, 0);
	}
	return 0;
}

__attribute__((noreturn)) static void second_stage(unsigned long flags, char **argv, char **sysctls, char **env)
{
	const char *uid = argv[UID], *gid = argv[GID];
	char *args[] = {"/pause", 0};

	/* These are the host's /dev/null. In a shared PID namespace, root could change it through
	 * /proc/PID/fd. */
	for (int fd = 0; fd <= PARENT_FD; fd++)
		SYSCALL(close, fd, 0, 0, 0, 0);
	SYSCALL(fcntl, CHILD_FD, F_SETFD, FD_CLOEXEC, 0, 0);
	SYSCALL(setsid, 0, 0, 0, 0, 0); /* it cannot fail: a new process leads no group */
	if (flags & CLONE_NEWNET) {
		must(SETNS, SYSCALL(setns, NETNS_FD, CLONE_NEWNET, 0, 0, 0));
		SYSCALL(close, NETNS_FD, 0, 0, 0, 0);
	}
	set_sysctls(sysctls); /* of these namespaces, through the host's /proc */
	enter_root(argv[DIR]);
	if (argv[NAME][0])
		must(HOSTNAME, SYSCALL(sethostname, argv[NAME], length(argv[NAME]), 0, 0, 0));
	join_keyring();
	become(number(&uid), number(&gid), argv[GROUP_LIST]);
	/* A process without capabilities needs no_new_privs before it may set a filter. */
	if (argv[MODE][0])
		must(NO_NEW_PRIVILEGES, SYSCALL(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	if (report(CHILD_FD, READY, 0) < 0 || !await(CHILD_FD))
		leave(1);
	if (argv[MODE][0] == 'f')
		filter();
	must(EXEC, SYSCALL(execve, args[0], args, env, 0, 0)); /* it closes CHILD_FD, which reports success */
	leave(1);
}

/*
 * enter is the first stage, in the launcher's namespaces. It waits until the pod's cgroup exists,
 * or the launcher has moved it there. Its child, the second stage, makes the pod's namespaces,
 * waits again and executes pause. Then the first stage exits, and the next subreaper adopts pause.
 */
__attribute__((noreturn)) static void enter(char **argv, char **env)
{
	const char *s = argv[FLAGS], *n = argv[CGROUPS];
	unsigned long flags = number(&s), cgroups = number(&n);
	unsigned long cpus[128]; /* 8192 processors */
	long pid, joined;

	if (!await(PARENT_FD))
		leave(1);
	joined = join_cgroups(argv + REST, cgroups);
	if (joined < 0) {
		report(PARENT_FD, CGROUP, -joined);
		leave(1);
	}
	/* This drops the daemon's CPU affinity, so that the pod's cpuset applies. */
	for (size_t i = 0; i < sizeof(cpus) / sizeof(cpus[0]); i++)
		((volatile unsigned long *)cpus)[i] = ~0UL;
	SYSCALL(sched_setaffinity, 0, sizeof(cpus), cpus, 0, 0);

	pid = SYSCALL(clone, (flags & ~(unsigned long)CLONE_NEWNET) | SIGCHLD, 0, 0, 0, 0);
	if (pid == 0)
		second_stage(flags, argv, argv + REST + cgroups, env);
	SYSCALL(close, CHILD_FD, 0, 0, 0, 0);
	report(PARENT_FD, pid < 0 ? CLONE : STARTED, pid < 0 ? -pid : pid);
	if (await(PARENT_FD)) /* it was killed */
		SYSCALL(wait4, pid, 0, 0, 0, 0);
	leave(0);
}

__attribute__((noreturn, used)) void begin(long *stack)
{
	long argc = *stack;
	char **argv = (char **)(stack + 1);

	if (argc >= REST)
		enter(argv, argv + argc + 1);
	hold();
}
