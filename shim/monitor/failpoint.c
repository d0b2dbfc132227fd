/*
 * The monitor's version of package internal/failpoint. If BERTH_FAILPOINTS names a directory, a
 * test can use files in it to trace the program, and to kill or stop it at a failpoint. Released
 * monitors are built without it. An internal error ends the monitor with a signal that no test
 * sends.
 */
#ifdef FAILPOINTS

#include <asm/signal.h>

#include "monitor.h"

#define LOCK_EX 2

static const char *directory, *program;

void failpoint_init(const char *name, char **environment)
{
	static const char variable[] = "BERTH_FAILPOINTS=";

	program = name;
	for (const char *s = name; *s != 0; s++)
		if (*s == '/')
			program = s + 1;
	for (; *environment != NULL; environment++)
		if (strlen(*environment) >= sizeof(variable) &&
			memcmp(*environment, variable, sizeof(variable) - 1) == 0)
			directory = *environment + sizeof(variable) - 1;
}

static void expect(bool ok)
{
	if (!ok)
		sys_kill((int)sys_getpid(), SIGABRT);
}

/* open_file opens a file of the directory, and returns -ENOENT if there is none. */
static long open_file(const char *name, int flags, char *path, size_t size)
{
	struct line l = {.at = path, .cap = size - 1};
	long fd;

	line_text(&l, directory);
	line_text(&l, name);
	path[l.len] = 0;
	fd = sys_openat(AT_FDCWD, path, flags | O_CLOEXEC, 0);
	expect(!failed(fd) || fd == -ENOENT);
	return fd;
}

/* note appends the failpoint, the pid and the program to the trace, if there is one. */
static void note(const char *name)
{
	char path[4096], text[256];
	struct line l = {.at = text, .cap = sizeof(text)};
	long fd = open_file("/trace", O_WRONLY | O_APPEND, path, sizeof(path));

	if (failed(fd))
		return;
	line_text(&l, name);
	line_text(&l, " ");
	line_int(&l, sys_getpid());
	line_text(&l, " ");
	line_text(&l, program);
	line_text(&l, "\n");
	expect(sys_write((int)fd, l.at, l.len) == (long)l.len);
	sys_close((int)fd);
}

/* is_meant returns whether text is this process's pid or program. */
static bool is_meant(struct text process)
{
	char text[16];
	struct line l = {.at = text, .cap = sizeof(text) - 1};

	line_int(&l, sys_getpid());
	text[l.len] = 0;
	return text_equals(process, text) || text_equals(process, program);
}

/* count_down decrements the number in the locked file if it names this failpoint, and returns
 * the signal when it reaches zero. */
static int count_down(int fd, const char *path, const char *name)
{
	char buf[256];
	long n = sys_pread(fd, buf, sizeof(buf), 0);
	struct text all = {buf, failed(n) ? 0 : (size_t)n}, fields[4];
	struct line number;
	uint64_t left;

	expect(!failed(n));
	all = text_trim(all);
	for (int i = 0; i < 4; i++)
		text_cut(&all, ' ', &fields[i]);
	expect(fields[3].len > 0 && all.len == 0);
	if (!text_equals(fields[0], name) || !is_meant(fields[3]))
		return 0;
	expect(text_unsigned(fields[1], INT32_MAX, &left));
	if (left < 1) /* another process reached zero first and has removed the file */
		return 0;
	left--;
	/* Padded to the length of the number that it replaces. */
	number = (struct line){.at = (char *)fields[1].at, .cap = fields[1].len};
	line_padded(&number, left, (unsigned int)fields[1].len);
	expect(sys_pwrite(fd, buf, (size_t)n, 0) == n);
	if (left > 0)
		return 0;
	expect(!failed(sys_unlinkat(AT_FDCWD, path, 0)));
	if (text_equals(fields[2], "kill"))
		return SIGKILL;
	expect(text_equals(fields[2], "stop"));
	return SIGSTOP;
}

void failpoint_reach(const char *name)
{
	char path[4096];
	long fd;
	int sig;

	if (directory == NULL)
		return;
	note(name);
	fd = open_file("/armed", O_RDWR, path, sizeof(path));
	if (failed(fd))
		return;
	expect(!failed(sys_flock((int)fd, LOCK_EX)));
	sig = count_down((int)fd, path, name);
	sys_close((int)fd); /* a stopped process must not hold the lock */
	if (sig != 0)
		sys_kill((int)sys_getpid(), sig);
}

#endif
