// taken stands in for a hostile CRIU that seems to complete the restore. The init that it
// names is a process of its own. Another process stays in the node's PID namespace. With the name
// "repeats" it repeats a step when libcontainer's init has ended.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RESTORE = 2, NOTIFY = 6, REPLY = 1 << 16 };

static char reply[REPLY];

// varint appends a number of a protobuf message.
static size_t varint(char *to, uint32_t n) {
	size_t len = 0;
	for (; n > 127; n >>= 7) to[len++] = n | 128;
	to[len++] = n;
	return len;
}

// say sends an answer of a type. Field part has a message.
static void say(int type, int part, const char *message, size_t len) {
	char data[256] = {1 << 3, type, 2 << 3, 1, part << 3 | 2, len};
	memcpy(data + 6, message, len);
	if (send(3, data, 6 + len, MSG_NOSIGNAL) < 0) _exit(1);
}

// notify reports a step, and waits until the launcher lets it go on.
static void notify(const char *step, int pid) {
	char message[64] = {1 << 3 | 2, strlen(step)};
	size_t len = 2 + strlen(step);
	memcpy(message + 2, step, strlen(step));
	message[len++] = 2 << 3;
	len += varint(message + len, pid);
	say(NOTIFY, 5, message, len);
	if (recv(3, reply, sizeof(reply), 0) <= 0) _exit(1);
}

static void wait_forever(const char *name) {
	prctl(PR_SET_NAME, name);
	for (int fd = 0; fd < 16; fd++) close(fd);
	for (;;) pause();
}

int main(int argc, char **argv) {
	if (argc < 1 || recv(3, reply, sizeof(reply), 0) < 0) return 1; // the request for a restore
	int init = syscall(SYS_clone, CLONE_PARENT | CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
	if (init == 0) wait_forever("taken-init");
	if (init < 0 || ptrace(PTRACE_SEIZE, init, 0, 0) < 0) return 1;
	if (fork() == 0) wait_forever("left-by-criu");
	notify("setup-namespaces", init);
	notify("post-setup-namespaces", 0);
	notify("pre-resume", 0);
	if (strstr(argv[0], "repeats")) notify("post-setup-namespaces", 0);
	char message[16] = {1 << 3};
	say(RESTORE, 4, message, 1 + varint(message + 1, init));
	return 0;
}
