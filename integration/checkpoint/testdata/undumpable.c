/*
 * undumpable holds something that a checkpoint has to refuse.
 *
 *	undumpable pidfd         a pidfd of a thread
 *	undumpable sysv          System V shared memory
 *	undumpable open PATH     an open file
 *
 * It prints "ready" when it has it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PIDFD_THREAD O_EXCL /* Linux 6.9 */

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	check(argc > 1, "arguments");
	if (strcmp(argv[1], "pidfd") == 0)
		check(syscall(SYS_pidfd_open, getpid(), PIDFD_THREAD) >= 0, "pidfd_open");
	else if (strcmp(argv[1], "sysv") == 0)
		check(shmat(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600), NULL, 0) != (void *)-1, "shmat");
	else
		check(argc == 3 && open(argv[2], O_RDONLY) >= 0, "open");
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
