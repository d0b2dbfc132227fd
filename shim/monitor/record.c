/* The exit record, in the format of proto.Exit. */
#include "monitor.h"

#define PATH_MAX 4096

static uint32_t crc32(const char *at, size_t n)
{
	uint32_t crc = ~(uint32_t)0;

	for (size_t i = 0; i < n; i++) {
		crc ^= (unsigned char)at[i];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (0xedb88320 & -(crc & 1)); /* the IEEE polynomial */
	}
	return ~crc;
}

void exit_record_encode(struct line *l, const struct exit_record *r)
{
	size_t start = l->len;

	line_int(l, r->code);
	line_text(l, " ");
	line_int(l, r->signal);
	line_text(l, r->oom_killed ? " true " : " false ");
	line_int(l, r->at);
	line_text(l, " ");
	line_unsigned(l, crc32(l->at + start, l->len - start), 16);
	line_text(l, "\n");
}

/* write_file overwrites a file before it truncates it, to keep the space that the launcher has
 * reserved. */
static long write_file(const char *path, const struct line *content)
{
	long fd = sys_openat(AT_FDCWD, path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	long result, closed;

	if (failed(fd))
		return fd;
	result = sys_write((int)fd, content->at, content->len);
	if (!failed(result) && (size_t)result < content->len)
		result = -ENOSPC;
	if (!failed(result))
		result = sys_ftruncate((int)fd, (long)content->len);
	closed = sys_close((int)fd);
	return failed(result) ? result : closed;
}

/* path writes DIR/NAME. It returns false if that is too long. */
static bool path(struct line *l, const char *dir, const char *name)
{
	line_text(l, dir);
	line_text(l, name);
	if (l->len == l->cap)
		return false;
	l->at[l->len] = 0;
	return true;
}

/* No sync, because the state directory does not outlive the boot. */
long exit_record_write(const char *dir, const struct exit_record *r)
{
	char content[128], to[PATH_MAX], from[PATH_MAX];
	struct line l = {.at = content, .cap = sizeof(content)};
	struct line final = {.at = to, .cap = sizeof(to)}, temporary = {.at = from, .cap = sizeof(from)};
	long result;

	exit_record_encode(&l, r);
	if (!path(&final, dir, "/exit") || !path(&temporary, dir, "/.exit"))
		return -ENAMETOOLONG;
	result = write_file(from, &l);
	if (failed(result))
		return result;
	REACH("monitor.rename-record");
	return sys_rename(from, to);
}
