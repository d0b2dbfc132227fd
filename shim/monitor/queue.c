/* The data for the clients: frames, and the queues of clients that do not read. */
#include "monitor.h"

void frame_header(char *to, unsigned char type, size_t n)
{
	to[0] = (char)type;
	for (int i = 0; i < 4; i++)
		to[1 + i] = (char)(n >> (24 - 8 * i));
}

long frame_next(const struct buffer *in)
{
	const unsigned char *at = (const unsigned char *)buffer_at(in);
	uint32_t length;

	if (in->len < HEADER_SIZE)
		return 0;
	length = (uint32_t)at[1] << 24 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 8 | at[4];
	if (length > MAX_PAYLOAD)
		return -1;
	return in->len < HEADER_SIZE + length ? 0 : (long)(HEADER_SIZE + length);
}

/* Why output is missing. */
static const char stalled[] = "the client has taken no output for ten minutes, while the container waited for it";
static const char far_behind[] = "the client is too far behind the container's output";

void client_lost(struct client *c)
{
	c->wants &= (unsigned char)~(WANT_STDOUT | WANT_STDERR | WANT_END);
	buffer_free(&c->queue);
}

/*
 * farewell sends a client the last frame. why is the reason why output is missing. If it is empty,
 * the output is complete. The queue moves into the socket's buffer, which outlives the connection
 * and this process, so a slow client need not be waited for. If data is lost here, the frame is
 * lost, too, and the client notices that.
 */
static void farewell(struct client *c, const char *why)
{
	char header[HEADER_SIZE];

	if ((c->wants & WANT_END) != 0) {
		frame_header(header, FRAME_END, strlen(why));
		if (buffer_append(&c->queue, header, sizeof(header)))
			buffer_append(&c->queue, why, strlen(why));
	}
	if (c->queue.len == 0)
		return;
	/* Without CAP_NET_ADMIN the limit is net.core.wmem_max. */
	if (failed(sys_setsockopt(c->fd, SO_SNDBUFFORCE, MAX_QUEUED)))
		sys_setsockopt(c->fd, SO_SNDBUF, MAX_QUEUED);
	sys_send(c->fd, buffer_at(&c->queue), c->queue.len);
}

void client_drop(struct client *c, const char *why)
{
	farewell(c, why);
	client_lost(c);
	c->dead = true;
}

bool client_waits(const struct monitor *m, const struct client *c)
{
	return stdin_must_wait(m) && frame_next(&c->in) > 0;
}

void client_watch(struct monitor *m, struct client *c)
{
	uint32_t events = 0;

	if (c->dead)
		return;
	if (!c->ended && !client_waits(m, c))
		events |= EPOLLIN;
	if (c->queue.len > 0)
		events |= EPOLLOUT;
	if (events == 0)
		forget(m, c->fd); /* epoll would report its disconnection forever */
	else
		watch_connection(m, c->fd, c->serial, events);
}

/* send_now sends as much as the socket takes. It returns the length, or -1 if the connection is
 * lost. */
static long send_now(const struct client *c, const char *data, size_t n)
{
	long sent = sys_send(c->fd, data, n);

	if (sent == -EAGAIN || sent == -EINTR)
		return 0;
	return failed(sent) ? -1 : sent;
}

static size_t all_queued(const struct monitor *m)
{
	size_t n = 0;

	for (int i = 0; i < m->client_count; i++)
		n += m->clients[i].queue.len;
	return n;
}

/* slowest returns the client with the longest queue. */
static struct client *slowest(struct monitor *m)
{
	struct client *most = &m->clients[0];

	for (int i = 1; i < m->client_count; i++)
		if (m->clients[i].queue.len > most->queue.len)
			most = &m->clients[i];
	return most;
}

/* send sends n bytes and queues the rest that the socket does not accept. */
static void send(struct monitor *m, struct client *c, const char *data, size_t n)
{
	if (c->queue.len == 0) {
		long sent = send_now(c, data, n);

		if (sent < 0) {
			client_lost(c);
			return;
		}
		data += sent;
		n -= (size_t)sent;
	}
	if (n == 0)
		return;
	if (c->queue.len == 0)
		c->progress = now(CLOCK_MONOTONIC);
	if (!buffer_append(&c->queue, data, n)) {
		client_lost(c);
		c->dead = true;
		return;
	}
	while (all_queued(m) > MAX_QUEUED)
		client_drop(slowest(m), far_behind);
	client_watch(m, c);
}

bool clients_full(const struct monitor *m) { return all_queued(m) >= FULL_QUEUES; }

/*
 * All stalled clients are dropped at once. The queue of each may be too small to fill the limit,
 * but their times to block the container must not add up.
 */
void clients_drop_stalled(struct monitor *m)
{
	int64_t since = now(CLOCK_MONOTONIC) - PATIENCE;

	if (m->full_since == 0 || m->full_since > since)
		return;
	for (int i = 0; i < m->client_count; i++)
		if (m->clients[i].queue.len > 0 && m->clients[i].progress <= since)
			client_drop(&m->clients[i], stalled);
}

void broadcast(struct monitor *m, unsigned char type, const char *data, size_t n)
{
	unsigned char want = type == FRAME_STDERR ? WANT_STDERR : WANT_STDOUT;

	for (int i = 0; i < m->client_count; i++)
		if ((m->clients[i].wants & want) != 0 && !m->clients[i].dead)
			send(m, &m->clients[i], data, n);
}

void client_reply(struct monitor *m, struct client *c, unsigned char type, const char *payload, size_t n)
{
	static char answer[HEADER_SIZE + 4096 + 256];

	n = min(n, sizeof(answer) - HEADER_SIZE);
	frame_header(answer, type, n);
	memcpy(answer + HEADER_SIZE, payload, n);
	send(m, c, answer, HEADER_SIZE + n);
}

void client_answer(struct monitor *m, struct client *c, const char *why)
{
	if (why == NULL)
		client_reply(m, c, FRAME_OK, "", 0);
	else
		client_reply(m, c, FRAME_ERROR, why, strlen(why));
}

void client_send_queue(struct client *c)
{
	while (c->queue.len > 0) {
		long sent = send_now(c, buffer_at(&c->queue), c->queue.len);

		if (sent < 0) {
			client_lost(c);
			return;
		}
		if (sent == 0)
			return;
		c->progress = now(CLOCK_MONOTONIC);
		buffer_drop(&c->queue, (size_t)sent);
	}
}

void clients_farewell(struct monitor *m)
{
	for (int i = 0; i < m->client_count; i++)
		if (!m->clients[i].dead)
			farewell(&m->clients[i], "");
}
