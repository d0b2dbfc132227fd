#include "monitor.h"

static const char bad_request[] = "unknown request";
static const char too_many[] = "too many clients are attached to the container, and this one is the oldest";

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
	client_drop(&m->clients[victim], too_many);
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

/* ACCEPT_REST is the pause after a lack of descriptors or memory, because the next attempt would
 * fail, too. */
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

static void attach(struct monitor *m, struct client *c, const char *payload, size_t n)
{
	static const char features[] = {ANNOUNCES_END};

	if (n != 1 || c->attached) {
		client_answer(m, c, bad_request);
		return;
	}
	c->attached = true;
	c->wants = (unsigned char)payload[0] | WANT_END;
	client_reply(m, c, FRAME_OK, features, sizeof(features));
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
		c->dead = true; /* no memory; closing the connection is better than a gap */
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
	if (c->ended && !client_waits(m, c))
		c->dead = true;
	client_watch(m, c);
}

void client_serve(struct monitor *m, struct client *c, uint32_t events)
{
	if ((events & EPOLLOUT) != 0)
		client_send_queue(c);
	if ((events & EPOLL_ERRORS) != 0) {
		client_lost(c);
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
