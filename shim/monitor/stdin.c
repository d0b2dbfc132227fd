#include "monitor.h"

/* shut closes the descriptor, except a terminal's, which output needs. */
static void shut(struct monitor *m)
{
	if (m->stdin >= 0 && m->stdin != m->params.console) {
		forget(m, m->stdin);
		sys_close(m->stdin);
	}
	m->stdin = -1;
	buffer_free(&m->pending);
}

/*
 * write_input writes as much as possible and returns the length. It drops input after the container
 * has closed its end.
 */
static size_t write_input(struct monitor *m, const char *data, size_t n)
{
	size_t done = 0;

	while (done < n) {
		long written = sys_write(m->stdin, data + done, n - done);

		if (written == -EINTR)
			continue;
		if (written == -EAGAIN)
			break;
		if (failed(written)) {
			shut(m);
			break;
		}
		done += (size_t)written;
	}
	return done;
}

/* watch_stdin waits until the container is ready for input, if input is pending. */
static void watch_stdin(struct monitor *m)
{
	bool waiting = m->pending.len > 0;

	if (m->stdin < 0)
		return;
	if (m->stdin == m->params.console)
		stream_watch(m, &m->streams[0]);
	else if (waiting)
		watch(m, m->stdin, EPOLLOUT);
	else
		forget(m, m->stdin);
}

/* The rest is pending. Until it is written, all clients' input waits. */
void stdin_write(struct monitor *m, const char *data, size_t n)
{
	size_t done;

	if (m->stdin < 0 || m->stdin_closing)
		return;
	done = write_input(m, data, n);
	if (done == n || m->stdin < 0)
		return;
	if (!buffer_append(&m->pending, data + done, n - done))
		shut(m); /* no memory; an end is better than a gap */
	watch_stdin(m);
}

bool stdin_flush(struct monitor *m)
{
	size_t done;

	if (m->stdin < 0)
		return false;
	done = write_input(m, buffer_at(&m->pending), m->pending.len);
	buffer_drop(&m->pending, done);
	if (m->pending.len > 0)
		return false;
	if (m->stdin_closing)
		shut(m);
	watch_stdin(m);
	return true;
}

void stdin_close(struct monitor *m)
{
	if (m->stdin < 0 || m->stdin == m->params.console)
		return;
	m->stdin_closing = true;
	if (m->pending.len == 0)
		shut(m);
}

/* The kernel sends SIGWINCH to the container. */
const char *resize(struct monitor *m, const char *payload, size_t n)
{
	const unsigned char *p = (const unsigned char *)payload;
	static char why[64];
	struct line l = {.at = why, .cap = sizeof(why) - 1};
	struct winsize size;
	long result;

	if (n != 4)
		return "bad terminal size";
	if (m->params.console < 0)
		return "the container has no terminal";
	size = (struct winsize){
		.ws_col = (unsigned short)(p[0] << 8 | p[1]), .ws_row = (unsigned short)(p[2] << 8 | p[3])};
	result = sys_ioctl(m->params.console, TIOCSWINSZ, (long)&size);
	if (!failed(result))
		return NULL;
	line_error(&l, (int)-result);
	why[l.len] = 0;
	return why;
}
