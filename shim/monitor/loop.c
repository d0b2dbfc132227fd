#include "monitor.h"

#define TIOCGPTPEER_FLAGS (O_RDWR | O_NOCTTY | O_CLOEXEC)

/* The buffer for the records of one write to the log. */
static char records[48 << 10];

static void close_on_exec(int fd) { sys_fcntl(fd, F_SETFD, FD_CLOEXEC); }

/* init_records provides space for the records of the longest line. */
static long init_records(struct monitor *m)
{
	size_t need = m->params.max_line > 0 ? (size_t)m->params.max_line + RECORD_OVERHEAD : 0;
	long at;

	m->records = (struct line){.at = records, .cap = sizeof(records)};
	if (need <= sizeof(records))
		return 0;
	at = sys_mmap(need); /* only for an unusual maximum */
	if (failed(at))
		return at;
	m->records = (struct line){.at = (char *)at, .cap = need};
	return 0;
}

static long add_stream(struct monitor *m, int fd, const char *name, unsigned char type)
{
	struct stream *s = &m->streams[m->stream_count];
	long result;

	if (fd < 0)
		return 0;
	m->stream_count++;
	s->fd = fd;
	s->frame_type = type;
	if (!encoder_init(&s->encoder, name, m->params.max_line))
		return -ENOMEM;
	result = set_nonblock(fd);
	return failed(result) ? result : watch(m, fd, EPOLLIN);
}

/* open_streams takes over the container's pipes or its terminal. */
static long open_streams(struct monitor *m)
{
	const struct params *p = &m->params;
	long result;

	if (p->console >= 0) {
		/* The other side is also open here, so the terminal does not end when the container closes
		 * it for a moment (Linux 4.13; on older kernels it ends). */
		sys_ioctl(p->console, TIOCGPTPEER, TIOCGPTPEER_FLAGS);
		result = add_stream(m, p->console, "stdout", FRAME_STDOUT);
	} else {
		result = add_stream(m, p->stdout, "stdout", FRAME_STDOUT);
		if (!failed(result))
			result = add_stream(m, p->stderr, "stderr", FRAME_STDERR);
	}
	m->stdin = p->stdin;
	if (!failed(result) && p->stdin >= 0)
		result = set_nonblock(p->stdin);
	return result;
}

long monitor_init(struct monitor *m, const struct params *p)
{
	long result = sys_epoll_create();

	m->params = *p;
	m->log = p->log;
	m->stdin = m->children = m->freezer.dir = -1;
	m->oom = (struct oom){.file = p->oom, .notify = p->oom_notify, .parent = p->oom_parent};
	if (failed(result))
		return result;
	m->epoll = (int)result;
	params_fds(p, close_on_exec);
	result = init_records(m);
	if (!failed(result))
		result = watch(m, p->init, EPOLLIN);
	if (!failed(result))
		result = set_nonblock(p->listen); /* a client may be gone before it is accepted */
	if (!failed(result))
		result = watch(m, p->listen, EPOLLIN);
	if (!failed(result) && p->orphans) /* they may end at any time */
		result = watch_children(m);
	if (!failed(result))
		result = open_streams(m);
	if (!failed(result))
		oom_watch(m);
	return failed(result) ? result : 0;
}

/* take_signals empties the signalfd. */
static void take_signals(const struct monitor *m)
{
	char info[128 * 8]; /* several struct signalfd_siginfo */

	while (sys_read(m->children, info, sizeof(info)) > 0)
		;
}

/* handle handles an event. data is the event_data of its descriptor. */
static void handle(struct monitor *m, uint64_t data, uint32_t events)
{
	const struct params *p = &m->params;
	int fd = (int)(uint32_t)data;

	if (fd == m->children)
		take_signals(m);
	if (fd == p->init || fd == m->children) {
		reap(m);
		if (fd == p->init && !m->init_ended)
			init_unreaped(m);
		return;
	}
	if (fd == p->listen) {
		client_accept(m);
		return;
	}
	if (fd == m->oom.file || fd == m->oom.notify || fd == m->oom.parent) {
		oom_read(m);
		return;
	}
	if (fd == m->stdin && (events & (EPOLLOUT | EPOLLERR)) != 0 && stdin_flush(m))
		clients_resume(m);
	for (int i = 0; i < m->stream_count; i++) {
		if (m->streams[i].fd == fd && (events & (EPOLLIN | EPOLL_ERRORS)) != 0) {
			if (clients_full(m))
				stream_watch(m, &m->streams[i]);
			else
				stream_read(m, &m->streams[i]);
			return;
		}
	}
	for (int i = 0; i < m->client_count; i++) {
		if (event_data(m->clients[i].fd, m->clients[i].serial) == data) {
			client_serve(m, &m->clients[i], events);
			return;
		}
	}
}

void monitor_round(struct monitor *m, const struct epoll_event *events, long n)
{
	for (long i = 0; i < n; i++)
		handle(m, events[i].data, events[i].events);
	clients_drop_stalled(m);
	clients_sweep(m);
	output_pace(m);
	clients_accept_again(m);
	freeze_continue(m);
}

/* ACCEPT_LOOK is the interval, in milliseconds, of checks whether paused accepting may continue. */
enum { ACCEPT_LOOK = 50 };

/* STALL_LOOK is the interval, in milliseconds, of looks for clients that block the container. */
enum { STALL_LOOK = 500 };

static int shorter(int timeout, int limit) { return timeout < 0 || timeout > limit ? limit : timeout; }

/* wait_limit returns the limit of the next wait, in milliseconds, -1: none. */
static int wait_limit(const struct monitor *m)
{
	int timeout = freeze_pause(m);

	if (m->full_since != 0)
		timeout = shorter(timeout, STALL_LOOK);
	if (m->accept_again != 0)
		timeout = shorter(timeout, ACCEPT_LOOK);
	return timeout;
}

int monitor_run(struct monitor *m)
{
	struct epoll_event events[16];

	REACH("monitor.watches");
	if (m->params.orphans)
		reap(m); /* children that ended before SIGCHLD was blocked */
	while (!m->init_ended) {
		long n = sys_epoll_wait(m->epoll, events, sizeof(events) / sizeof(events[0]), wait_limit(m));

		if (n == -EINTR)
			continue;
		if (failed(n))
			return 1;
		monitor_round(m, events, n);
	}
	freeze_cancel(m);
	return finish(m);
}
