/*
 * The count of OOM kills in the container's cgroup. The file was opened when the container started,
 * because the systemd driver removes a cgroup as soon as it is empty. That may be before the
 * monitor reads it. So the count is read after each change, which an eventfd (v1, notify) or
 * EPOLLPRI on the file (v2) reports.
 *
 * The parent cgroup (v2) counts the kills of all its children. With the systemd driver the
 * container's cgroup may be gone before the monitor has seen its last change. In this case a kill
 * that only the parent has counted is attributed to the container.
 */
#include "monitor.h"

void oom_watch(struct monitor *m)
{
	if (m->oom.file < 0)
		return;
	if (m->oom.notify >= 0)
		watch(m, m->oom.notify, EPOLLIN); /* if it fails, the count is read at the end */
	else
		watch(m, m->oom.file, EPOLLPRI);
	if (m->oom.parent >= 0)
		watch(m, m->oom.parent, EPOLLPRI);
	oom_read(m); /* kernfs reports changes since the last read */
}

bool oom_kills(struct text data, uint64_t *kills)
{
	static const char name[] = "oom_kill ";
	const size_t n = sizeof(name) - 1;

	while (data.len > 0) {
		struct text line;

		text_cut(&data, '\n', &line);
		if (line.len < n || memcmp(line.at, name, n) != 0)
			continue;
		return text_unsigned(text_trim((struct text){line.at + n, line.len - n}), UINT64_MAX, kills);
	}
	return false;
}

/* read_kills reads the count from a file of kernfs. It returns 0 or -errno. */
static long read_kills(int fd, uint64_t *kills)
{
	char buf[512];
	long n = fd < 0 ? -EBADF : sys_pread(fd, buf, sizeof(buf), 0);

	if (failed(n))
		return n;
	return oom_kills((struct text){buf, (size_t)n}, kills) ? 0 : -ENODATA;
}

/* gone stops watching a removed cgroup. */
static void gone(struct monitor *m, bool killed_above)
{
	const int fds[] = {m->oom.file, m->oom.notify, m->oom.parent};

	m->oom.kills += killed_above;
	for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
		if (fds[i] >= 0)
			forget(m, fds[i]); /* it would stay ready */
	m->oom.file = -1;
}

void oom_read(struct monitor *m)
{
	uint64_t kills = 0, above = 0, count;
	long result, parent;

	if (m->oom.file < 0)
		return;
	if (m->oom.notify >= 0)
		sys_read(m->oom.notify, &count, sizeof(count)); /* resets it; it is non-blocking */
	result = read_kills(m->oom.file, &kills);
	parent = read_kills(m->oom.parent, &above);
	if (result == -EINTR)
		return;
	if (result == 0)
		m->oom.kills = kills;
	else
		gone(m, parent == 0 && above > m->oom.parent_kills);
	if (parent == 0)
		m->oom.parent_kills = above;
}
