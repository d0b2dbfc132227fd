#include "monitor.h"

/* log_write appends whole records to the log. It drops records that cannot be written, because the
 * container must continue. */
static void log_write(struct monitor *m, const char *data, size_t n);

/* timestamp writes the current time. */
static struct text timestamp(struct line *l)
{
	int64_t t = now(CLOCK_REALTIME);

	line_time(l, t / SECOND, (uint32_t)(t % SECOND));
	return (struct text){l->at, l->len};
}

/* log_output encodes n bytes and writes them, at once if they fit. */
static void log_output(struct monitor *m, struct stream *s, const char *data, size_t n)
{
	char stamp_text[RECORD_OVERHEAD];
	struct line l = {.at = stamp_text, .cap = sizeof(stamp_text)};
	struct text stamp;

	if (m->log < 0)
		return;
	stamp = timestamp(&l);
	for (size_t done = 0; done < n;) {
		m->records.len = 0;
		done += encoder_append(&s->encoder, &m->records, stamp, data + done, n - done);
		log_write(m, m->records.at, m->records.len);
	}
}

size_t stream_read(struct monitor *m, struct stream *s)
{
	char *data = frame + HEADER_SIZE;
	long n = sys_read(s->fd, data, MAX_PAYLOAD);

	if (n == -EAGAIN || n == -EINTR)
		return 0;
	if (n <= 0) { /* end of file, or EIO: no process has the terminal open */
		forget(m, s->fd);
		return 0;
	}
	log_output(m, s, data, (size_t)n);
	frame_header(frame, s->frame_type, (size_t)n);
	broadcast(m, s->frame_type, frame, HEADER_SIZE + (size_t)n);
	return (size_t)n;
}

void stream_watch(struct monitor *m, const struct stream *s)
{
	uint32_t events = m->full_since == 0 ? EPOLLIN : 0;

	if (s->fd == m->stdin && m->pending.len > 0)
		events |= EPOLLOUT;
	if (events == 0)
		forget(m, s->fd); /* epoll would report its end forever */
	else
		watch(m, s->fd, events);
}

void output_pace(struct monitor *m)
{
	bool full = clients_full(m);

	if (full == (m->full_since != 0))
		return;
	m->full_since = full ? now(CLOCK_MONOTONIC) : 0;
	for (int i = 0; i < m->stream_count; i++)
		stream_watch(m, &m->streams[i]);
}

/*
 * take_back removes the incomplete record at the end of a write, so that the next one starts on a
 * new line, and returns its length.
 */
static size_t take_back(struct monitor *m, const char *written, size_t n)
{
	size_t torn = 0;
	struct statx st;

	while (torn < n && written[n - 1 - torn] != '\n')
		torn++;
	if (torn == 0 || failed(sys_statx(m->log, "", AT_EMPTY_PATH, STATX_SIZE, &st)) || st.stx_size < torn)
		return 0;
	REACH("monitor.take-back");
	if (failed(sys_ftruncate(m->log, (long)(st.stx_size - torn))))
		return 0;
	return torn;
}

static void log_write(struct monitor *m, const char *data, size_t n)
{
	while (n > 0 && m->log >= 0) {
		long written;

		REACH("monitor.write-log");
		written = sys_write(m->log, data, n);
		REACH("monitor.log-written");
		if (written == -EINTR)
			continue;
		if (failed(written))
			return;
		if ((size_t)written < n) {
			written -= (long)take_back(m, data, (size_t)written);
			if (written == 0)
				return;
		}
		data += written;
		n -= (size_t)written;
	}
}

const char *log_reopen(struct monitor *m)
{
	static char why[4096 + 256];
	struct line l = {.at = why, .cap = sizeof(why) - 1};
	int fd;

	if (m->params.log_path[0] == 0)
		return NULL;
	REACH("monitor.open-log");
	fd = logfile_open(m->params.log_dir, m->params.log_path, &l);
	if (fd < 0) {
		why[l.len] = 0;
		return why;
	}
	REACH("monitor.log-opened");
	sys_close(m->log);
	m->log = fd;
	return NULL;
}

/* Another process may still write, so this reads no more than a pipe can hold. */
void stream_drain(struct monitor *m, struct stream *s)
{
	long left = sys_fcntl(s->fd, F_GETPIPE_SZ, 0);

	if (failed(left))
		left = 64 << 10; /* a terminal */
	while (left > 0) {
		size_t n = stream_read(m, s);

		if (n == 0)
			return;
		left -= (long)n;
	}
}

void log_flush(struct monitor *m)
{
	char stamp_text[RECORD_OVERHEAD];
	struct line l = {.at = stamp_text, .cap = sizeof(stamp_text)};
	struct text stamp = timestamp(&l);

	for (int i = 0; i < m->stream_count; i++) {
		m->records.len = 0;
		encoder_flush(&m->streams[i].encoder, &m->records, stamp);
		log_write(m, m->records.at, m->records.len);
	}
}
