/* The monitor's version of cgroup.KillDir. It kills every process in a cgroup directory and below.
 * */
#include <asm/signal.h>

#include "monitor.h"

#define SIGNAL_NONE 0

/* entry is struct linux_dirent64, which the kernel's user headers lack. */
struct entry {
	uint64_t ino;
	int64_t off;
	uint16_t size;
	uint8_t type;
	char name[];
};

enum { DT_DIR = 4 };

/* is_gone returns whether an error means that a cgroup does not exist. Opening its files fails with
 * ENOENT. Using files that were opened before its removal fails with ENODEV. */
static bool is_gone(long result) { return result == -ENOENT || result == -ENODEV; }

long file_write(int dir, const char *name, const char *text)
{
	long fd = sys_openat(dir, name, O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0), result;

	if (failed(fd))
		return fd;
	result = sys_write((int)fd, text, strlen(text));
	sys_close((int)fd);
	return failed(result) ? result : 0;
}

/* each_pid sends sig, unless it is 0, to the processes that a file lists, and counts them. It
 * returns 0 or -errno. */
static long each_pid(int fd, int sig, size_t *count)
{
	char buf[1024];
	uint64_t pid = 0;
	long n;

	while ((n = sys_read(fd, buf, sizeof(buf))) > 0) {
		for (long i = 0; i < n; i++) {
			if (buf[i] >= '0' && buf[i] <= '9') {
				pid = 10 * pid + (uint64_t)(buf[i] - '0');
				continue;
			}
			/* 0 is a process outside the reader's PID namespace. */
			if (pid > 0 && pid <= INT32_MAX) {
				*count += 1;
				if (sig != SIGNAL_NONE)
					sys_kill((int)pid, sig); /* it may have ended meanwhile */
			}
			pid = 0;
		}
	}
	return n;
}

static long own_pids(int dir, const char *name, int sig, size_t *count)
{
	long fd = sys_openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0), result;

	if (failed(fd))
		return fd;
	result = each_pid((int)fd, sig, count);
	sys_close((int)fd);
	return result;
}

/* DEEPEST bounds the stack and the descriptors of the recursion. Only an attack nests cgroups
 * deeper. */
enum { DEEPEST = 64 };

static long tree_pids(int dir, int sig, size_t *count, int depth);

/* child_pids is each_pid for the cgroups below dir. */
static long child_pids(int dir, int sig, size_t *count, int depth)
{
	char buf[2048] __attribute__((aligned(8)));
	long n, result = 0;

	n = sys_lseek(dir, 0, SEEK_SET); /* it was read before in this round */
	if (failed(n))
		return n;
	while ((n = sys_getdents64(dir, buf, sizeof(buf))) > 0) {
		for (long at = 0; at < n;) {
			const struct entry *e = (const struct entry *)(buf + at);
			long below, fd;

			at += e->size;
			if (e->type != DT_DIR || text_equals(text_of(e->name), ".") ||
				text_equals(text_of(e->name), ".."))
				continue;
			fd = sys_openat(dir, e->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0);
			below = failed(fd) ? fd : tree_pids((int)fd, sig, count, depth + 1);
			if (!failed(fd))
				sys_close((int)fd);
			if (failed(below) && !is_gone(below))
				result = below;
		}
	}
	return failed(n) ? n : result;
}

/* tree_pids is each_pid for dir and all cgroups below it. */
static long tree_pids(int dir, int sig, size_t *count, int depth)
{
	long result;

	if (depth > DEEPEST)
		return -ELOOP;
	result = own_pids(dir, "cgroup.procs", sig, count);
	/* A threaded cgroup (v2) lists threads. A signal to a thread reaches its process. */
	if (result == -EOPNOTSUPP)
		result = own_pids(dir, "cgroup.threads", sig, count);
	if (is_gone(result))
		return 0;
	return failed(result) ? result : child_pids(dir, sig, count, depth);
}

/* FREEZE_PATIENCE bounds the wait for a freeze, which a process in uninterruptible sleep can
 * delay. */
#define FREEZE_PATIENCE (200 * MILLISECOND)

bool file_begins(int dir, const char *name, const char *text)
{
	char buf[16];
	long fd = sys_openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0), n;

	if (failed(fd))
		return false;
	n = sys_read((int)fd, buf, sizeof(buf));
	sys_close((int)fd);
	if (n < (long)strlen(text))
		return false;
	for (size_t i = 0; i < strlen(text); i++) {
		if (buf[i] != text[i])
			return false;
	}
	return true;
}

/*
 * freeze freezes a cgroup and waits until it is frozen. The v1 freezer returns while processes
 * still run, and their forks would escape the signals. If the hierarchy has no freezer, the kill
 * takes more rounds.
 */
static void freeze(int dir, const char *freezer, const char *frozen)
{
	int64_t deadline = now(CLOCK_MONOTONIC) + FREEZE_PATIENCE;

	while (!failed(file_write(dir, freezer, frozen)) && !file_begins(dir, freezer, frozen) &&
		now(CLOCK_MONOTONIC) < deadline)
		sleep_for(MILLISECOND);
}

/* kill_all kills the current processes. On v1 it freezes the cgroup meanwhile, so that no fork
 * escapes. */
static void kill_all(int dir)
{
	const char *freezer = "freezer.state", *frozen = "FROZEN", *thawed = "THAWED";
	size_t count = 0;

	if (!failed(file_write(dir, "cgroup.kill", "1"))) /* v2 since Linux 5.14 */
		return;
	if (!failed(sys_faccessat(dir, "cgroup.freeze", 0))) { /* older v2 */
		freezer = "cgroup.freeze";
		frozen = "1";
		thawed = "0";
	}
	freeze(dir, freezer, frozen);
	REACH("monitor.orphans-frozen");
	tree_pids(dir, SIGKILL, &count, 0);
	REACH("monitor.orphans-signalled");
	file_write(dir, freezer, thawed);
}

/* round_of kills all processes and returns whether none is left. */
static bool round_of(const char *path)
{
	long dir = sys_openat(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), result;
	size_t left = 0;

	if (failed(dir))
		return is_gone(dir);
	kill_all((int)dir);
	result = tree_pids((int)dir, SIGNAL_NONE, &left, 0);
	sys_close((int)dir);
	return !failed(result) && left == 0;
}

/* Processes may fork, be frozen, or be in uninterruptible sleep. */
bool kill_tree(const char *dir, int64_t patience)
{
	int64_t deadline = now(CLOCK_MONOTONIC) + patience;

	for (int64_t delay = MILLISECOND; !round_of(dir); delay *= 2) {
		if (now(CLOCK_MONOTONIC) >= deadline)
			return false;
		if (delay > 50 * MILLISECOND)
			delay = 50 * MILLISECOND;
		sleep_for(delay);
	}
	return true;
}
