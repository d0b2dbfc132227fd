#ifndef BERTH_BPFCACHE_LASTSTEP_H
#define BERTH_BPFCACHE_LASTSTEP_H

#include <stddef.h>

// laststep installs a filter (struct sock_filter) in the calling thread and executes a program. The
// only system call between the two is execve. It does not return.
void laststep(
	const void *program, size_t size, unsigned int flags, const char *path, char *const argv[], char *const envp[]);

#endif
