#define _GNU_SOURCE
#include "inside.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int __real_clone(int (*fn)(void *), void *stack, int flags, void *arg, ...);
int __wrap_clone(int (*fn)(void *), void *stack, int flags, void *arg, ...);

// enter moves this process into a cgroup. It waits for an RCU grace period.
static int enter(int cgroup)
{
	int fd = openat(cgroup, "cgroup.procs", O_WRONLY | O_CLOEXEC);
	int ret = fd < 0 || write(fd, "0", 1) != 1 ? -1 : 0;

	if (fd >= 0)
		close(fd);
	return ret;
}

// libcontainer's nsexec calls clone twice: in the process that libcontainer has started, and in its
// child. Only the first call starts its child in the cgroup, because the child's children start
// there, too. nsexec uses no shared memory, so the child can stay on this stack. With CLONE_PARENT
// the child has the exit signal of this process (clone(2)).
int __wrap_clone(int (*fn)(void *), void *stack, int flags, void *arg, ...)
{
	static int inside;
	struct clone_args args = {.flags = (unsigned)(flags & ~CSIGNAL) | CLONE_INTO_CGROUP};
	char *dir;
	int cgroup;
	long pid;

	if (inside || strncmp(program_invocation_name, INSIDE, strlen(INSIDE)) != 0)
		return __real_clone(fn, stack, flags, arg);
	inside = 1;
	dir = program_invocation_name + strlen(INSIDE);
	cgroup = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
	memset(dir, 0, strlen(dir)); // other containers may read init's arguments
	if (cgroup < 0)
		return -1;
	args.cgroup = (unsigned)cgroup;
	pid = syscall(SYS_clone3, &args, sizeof(args));
	if (pid == 0) {
		close(cgroup);
		_exit(fn(arg));
	}
	if (pid < 0 && enter(cgroup) == 0) // a filter of system calls may not know clone3
		pid = __real_clone(fn, stack, flags, arg);
	close(cgroup);
	return (int)pid;
}
