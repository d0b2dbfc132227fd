#include "monitor.h"

static const char bad_request[] = "unknown request";

void frame_header(char *to, unsigned char type, size_t n)
{
	to[0] = (char)type;
	for (int i = 0; i < 4; i++)
		to[1 + i] = (char)(n >> (24 - 8 * i));
}

/* frame_next returns the length of the first frame of in, 0 if it is incomplete, -1 if it is too
 * long. */
static long frame_next(const struct buffer *in)
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
static const char too_many[] = "too many clients are attached to the container, and this one is the oldest";

/* lost marks a client that cannot be sent to. Its earlier requests still count. */
static void lost(struct client *c)
{
	c->wants &= (unsigned char)~(WANT_STDOUT | WANT_STDERR | WANT_END);
	buffer_free(&c->queue);
}

/*
 * farewell sends a client the last frame. why says why output is missing; empty: it is complete.
 * The queue moves into the socket's buffer, which outlives the connection and this process, so a
 * slow client need not be waited for. If something is lost here the frame is, too, and the client
 * notices that.
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

/* drop disconnects a client that misses output from now on. */
static void drop(struct client *c, const char *why)
{
	farewell(c, why);
	lost(c);
	c->dead = true;
}

/* waits returns whether the client's next request is complete but has to wait. */
static bool waits(const struct monitor *m, const struct client *c)
{
	return stdin_must_wait(m) && frame_next(&c->in) > 0;
}

/* watch_client waits for input unless a request is waiting, and for space in the socket if
 * output is queued. */
static void watch_client(struct monitor *m, struct client *c)
{
	uint32_t events = 0;

	if (c->dead)
		return;
	if (!c->ended && !waits(m, c))
		events |= EPOLLIN;
	if (c->queue.len > 0)
		events |= EPOLLOUT;
	if (events == 0)
		forget(m, c->fd); /* epoll would report its disconnection forever */
	else
		watch_connection(m, c->fd, c->serial, events);
}

/* stdin_left notes that a client sends no more input. */
static void stdin_left(struct monitor *m, struct client *c)
{
	if ((c->wants & WANT_STDIN) == 0)
		return;
	c->wants &= (unsigned char)~WANT_STDIN;
	if (m->params.stdin_once)
		stdin_close(m);
}

void clients_sweep(struct monitor *m)
{
	for (int i = 0; i < m->client_count;) {
		struct client *c = &m->clients[i];

		if (!c->dead) {
			i++;
			continue;
		}
		stdin_left(m, c);
		freeze_end(m, c);
		sys_close(c->fd);
		buffer_free(&c->in);
		buffer_free(&c->queue);
		m->client_count--;
		memmove(c, c + 1, (size_t)(m->client_count - i) * sizeof(*c));
	}
}

/*
 * evict disconnects the oldest client that has hung up, otherwise the oldest of all, to make room
 * for another. Clients of a container that never reads its stdin would block the rotation of its
 * log.
 */
static void evict(struct monitor *m)
{
	int victim = 0;

	for (int i = 0; i < m->client_count; i++) {
		if (m->clients[i].gone) {
			victim = i;
			break;
		}
	}
	drop(&m->clients[victim], too_many);
	clients_sweep(m);
}

/* may_connect returns whether the peer is root or this process's user. */
static bool may_connect(int fd)
{
	struct ucred peer;
	unsigned int size = sizeof(peer);

	if (failed(sys_getsockopt(fd, SO_PEERCRED, &peer, &size)) || size != sizeof(peer))
		return false;
	return peer.uid == 0 || peer.uid == (uint32_t)sys_geteuid();
}

/* ACCEPT_REST is the pause after a lack of descriptors or memory: the next attempt would fail,
 * too. */
#define ACCEPT_REST (100 * MILLISECOND)

void clients_accept_again(struct monitor *m)
{
	if (m->accept_again == 0 || now(CLOCK_MONOTONIC) < m->accept_again)
		return;
	if (!failed(watch(m, m->params.listen, EPOLLIN)))
		m->accept_again = 0;
}

/* accept_failed stops watching a socket that would be ready again at once. Other errors concern a
 * connection that is gone. */
static void accept_failed(struct monitor *m, long error)
{
	if (error != -EMFILE && error != -ENFILE && error != -ENOBUFS && error != -ENOMEM)
		return;
	forget(m, m->params.listen);
	m->accept_again = now(CLOCK_MONOTONIC) + ACCEPT_REST;
}

/* next_serial returns a number that none of the last billions of connections has. */
static uint32_t next_serial(struct monitor *m)
{
	if (++m->last_serial == 0) /* 0 means no connection */
		m->last_serial = 1;
	return m->last_serial;
}

void client_accept(struct monitor *m)
{
	long fd = sys_accept(m->params.listen);
	uint32_t serial;
	bool allowed;

	if (failed(fd)) {
		accept_failed(m, fd);
		return;
	}
	serial = next_serial(m);
	allowed = may_connect((int)fd);
	if (allowed && m->client_count == MAX_CLIENTS)
		evict(m);
	if (!allowed || m->client_count == MAX_CLIENTS || failed(watch_connection(m, (int)fd, serial, EPOLLIN))) {
		sys_close((int)fd);
		return;
	}
	m->clients[m->client_count++] = (struct client){.fd = (int)fd, .serial = serial};
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
			lost(c);
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
		lost(c);
		c->dead = true;
		return;
	}
	while (all_queued(m) > MAX_QUEUED)
		drop(slowest(m), far_behind);
	watch_client(m, c);
}

bool clients_full(const struct monitor *m) { return all_queued(m) >= FULL_QUEUES; }

/*
 * All stalled clients are dropped at once: each may be too small to fill the queues, and their
 * times to block the container must not add up.
 */
void clients_drop_stalled(struct monitor *m)
{
	int64_t since = now(CLOCK_MONOTONIC) - PATIENCE;

	if (m->full_since == 0 || m->full_since > since)
		return;
	for (int i = 0; i < m->client_count; i++)
		if (m->clients[i].queue.len > 0 && m->clients[i].progress <= since)
			drop(&m->clients[i], stalled);
}

void broadcast(struct monitor *m, unsigned char type, const char *data, size_t n)
{
	unsigned char want = type == FRAME_STDERR ? WANT_STDERR : WANT_STDOUT;

	for (int i = 0; i < m->client_count; i++)
		if ((m->clients[i].wants & want) != 0 && !m->clients[i].dead)
			send(m, &m->clients[i], data, n);
}

/* reply sends a client an answer, of which it cuts off what is too long. */
static void reply(struct monitor *m, struct client *c, unsigned char type, const char *payload, size_t n)
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
		reply(m, c, FRAME_OK, "", 0);
	else
		reply(m, c, FRAME_ERROR, why, strlen(why));
}

static void attach(struct monitor *m, struct client *c, const char *payload, size_t n)
{
	static const char features[] = {ANNOUNCES_END};

	if (n != 1 || c->attached) {
		client_answer(m, c, bad_request);
		return;
	}
	c->attached = true;
	c->wants = (unsigned char)payload[0] | WANT_END;
	reply(m, c, FRAME_OK, features, sizeof(features));
}

static void request(struct monitor *m, struct client *c, unsigned char type, const char *payload, size_t n)
{
	switch (type) {
	case FRAME_STDIN:
		if ((c->wants & WANT_STDIN) != 0)
			stdin_write(m, payload, n);
		return;
	case FRAME_STDIN_EOF: stdin_left(m, c); return;
	case FRAME_ATTACH: attach(m, c, payload, n); return;
	case FRAME_RESIZE: client_answer(m, c, resize(m, payload, n)); return;
	case FRAME_REOPEN: client_answer(m, c, log_reopen(m)); return;
	case FRAME_CLOSE_STDIN:
		stdin_close(m);
		client_answer(m, c, NULL);
		return;
	case FRAME_FREEZE: {
		const char *why = freeze_begin(m, c, payload, n);

		if (why != NULL)
			client_answer(m, c, why);
		return;
	}
	case FRAME_THAW: client_answer(m, c, freeze_end(m, c)); return;
	default: client_answer(m, c, bad_request);
	}
}

/* receive reads at most one frame, so that a client cannot fill memory. */
static void receive(struct client *c)
{
	const size_t room = HEADER_SIZE + MAX_PAYLOAD;
	long n;

	if (c->in.len >= room)
		return;
	n = sys_read(c->fd, frame, room - c->in.len);
	if (n == -EAGAIN || n == -EINTR)
		return;
	if (n <= 0)
		c->ended = true;
	else if (!buffer_append(&c->in, frame, (size_t)n))
		c->dead = true; /* no memory: closing the connection is better than a gap */
}

/* carry_out processes the received requests until one has to wait. */
static void carry_out(struct monitor *m, struct client *c)
{
	while (!c->dead) {
		long size = frame_next(&c->in);
		const char *at = buffer_at(&c->in);

		if (size < 0) {
			c->dead = true;
			return;
		}
		if (size == 0 || (at[0] == FRAME_STDIN && stdin_must_wait(m)))
			break;
		request(m, c, (unsigned char)at[0], at + HEADER_SIZE, (size_t)size - HEADER_SIZE);
		buffer_drop(&c->in, (size_t)size);
	}
	if (c->ended && !waits(m, c))
		c->dead = true;
	watch_client(m, c);
}

static void send_queue(struct client *c)
{
	while (c->queue.len > 0) {
		long sent = send_now(c, buffer_at(&c->queue), c->queue.len);

		if (sent < 0) {
			lost(c);
			return;
		}
		if (sent == 0)
			return;
		c->progress = now(CLOCK_MONOTONIC);
		buffer_drop(&c->queue, (size_t)sent);
	}
}

void client_serve(struct monitor *m, struct client *c, uint32_t events)
{
	if ((events & EPOLLOUT) != 0)
		send_queue(c);
	if ((events & EPOLL_ERRORS) != 0) {
		lost(c);
		c->gone = true;
	}
	if (!c->ended && (events & (EPOLLIN | EPOLL_ERRORS)) != 0)
		receive(c);
	carry_out(m, c);
}

void clients_resume(struct monitor *m)
{
	for (int i = 0; i < m->client_count; i++)
		if (!m->clients[i].dead)
			carry_out(m, &m->clients[i]);
}

void clients_farewell(struct monitor *m)
{
	for (int i = 0; i < m->client_count; i++)
		if (!m->clients[i].dead)
			farewell(&m->clients[i], "");
}
