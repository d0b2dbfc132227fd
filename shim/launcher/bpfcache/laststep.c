//go:build cgo && seccomp

#define _GNU_SOURCE
#include "laststep.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

// drop_handlers sets the default action for each signal that Go's runtime handles, as execve will
// do. Otherwise a signal between filter and execve would need rt_sigreturn.
static void drop_handlers(void)
{
	for (int sig = 1; sig < NSIG; sig++) {
		struct sigaction action;

		if (sigaction(sig, NULL, &action) != 0 || action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)
			continue;
		memset(&action, 0, sizeof(action));
		sigaction(sig, &action, NULL);
	}
}

static int install(const struct sock_fprog *filter, unsigned int flags)
{
	if (flags == 0)
		return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0);
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, filter);
}

// fail writes the reason to standard error, as libcontainer does, and ends the process. The filter
// may refuse both.
static void fail(const char *what, const char *path, int reason)
{
	char text[4096 + 256];
	int n = snprintf(text, sizeof(text), "%s%s: %s\n", what, path, strerror(reason));
	char *first = strstr(text, ": ") + 2;
	ssize_t written;

	if (*path && first[0] >= 'A' && first[0] <= 'Z' && first[1] >= 'a') // as Go spells it
		first[0] += 'a' - 'A';
	written = write(STDERR_FILENO, text, n < (int)sizeof(text) ? (size_t)n : sizeof(text) - 1);
	(void)written; // nobody can be told any more
	syscall(SYS_exit_group, 255);
	__builtin_trap();
}

void laststep(
	const void *program, size_t size, unsigned int flags, const char *path, char *const argv[], char *const envp[])
{
	struct sock_fprog filter = {
		.len = (unsigned short)(size / sizeof(struct sock_filter)), .filter = (struct sock_filter *)program};

	drop_handlers();
	if (install(&filter, flags) != 0)
		fail("install the seccomp filter", "", errno);
	do
		execve(path, argv, envp);
	while (errno == EINTR);
	fail("exec ", path, errno);
}
