//go:build isal && cgo

// The steps of jail.Process that must precede threads, in the same order.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef OPEN_TREE_CLONE // <linux/mount.h> and glibc's <sys/mount.h> exclude each other, and some systems have neither
#define OPEN_TREE_CLONE 1
#define OPEN_TREE_CLOEXEC O_CLOEXEC
#endif

enum {
	tree = 3,                // jail.TreeFD
	stack_size = 256 * 1024, // stack size of threads, because reserved memory counts for the limit
};

static void must(int succeeded, const char *step)
{
	if (succeeded)
		return;
	dprintf(STDERR_FILENO, "%s: %s\n", step, strerror(errno));
	_exit(1);
}

static void volunteer(void)
{
	static const char first[] = "1000";
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	must(fd >= 0 && write(fd, first, sizeof first - 1) == sizeof first - 1 && close(fd) == 0, "volunteer for the OOM killer");
}

static void enter(void)
{
	int fds = syscall(SYS_open_tree, AT_FDCWD, "/proc/self/fd", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
	must(fds >= 0, "clone /proc/self/fd");
	must(fchdir(tree) == 0 && chroot(".") == 0 && fchdir(fds) == 0 && close(fds) == 0, "enter the tree");
}

static void drop_capabilities(void)
{
	const __u32 kept = 1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER | 1u << CAP_FSETID | 1u << CAP_MKNOD | 1u << CAP_SETFCAP;
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {{.effective = kept, .permitted = kept}};
	must(syscall(SYS_capset, &header, sets) == 0, "give up capabilities");
}

static void limit_stacks(void)
{
	pthread_attr_t attr;
	must((errno = pthread_attr_init(&attr)) == 0, "limit stacks");
	must((errno = pthread_attr_setstacksize(&attr, stack_size)) == 0, "limit stacks");
	must((errno = pthread_setattr_default_np(&attr)) == 0, "limit stacks");
	pthread_attr_destroy(&attr);
}

// confine_early has no priority, so it runs after constructors with a priority. Package isal has
// loaded its library by then.
__attribute__((constructor)) static void confine_early(void)
{
	must(fcntl(tree, F_GETFD) >= 0, "berth-unpack must be started by berth");
	volunteer();
	enter();
	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "renounce privileges");
	drop_capabilities();
	limit_stacks();
}
