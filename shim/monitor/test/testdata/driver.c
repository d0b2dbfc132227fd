/*
 * driver gives tests access to functions of the monitor (package shim/monitor/test). It is built
 * with the sanitizers, which end it when they find an error.
 *
 * A question on stdin is a byte for its kind, its length in four big-endian bytes, and that many
 * bytes. The answer on stdout is its length in four bytes, and that many bytes.
 */
#include "monitor.h"

enum { AF_UNIX = 1, SOCK_STREAM = 1, SHUT_WR = 1, F_SETPIPE = F_SETPIPE_SZ, LONGEST = 1 << 24 };

static struct line reply;

static void expect(bool ok)
{
	if (!ok)
		sys_exit(3);
}

static void *allocate(size_t n)
{
	void *at = malloc(n + (n == 0));

	expect(at != NULL);
	return at;
}

/* read_all reads n bytes. It returns false at the end of the input. */
static bool read_all(void *to, size_t n)
{
	for (size_t done = 0; done < n;) {
		long got = sys_read(0, (char *)to + done, n - done);

		expect(!failed(got));
		if (got == 0)
			return false;
		done += (size_t)got;
	}
	return true;
}

static void write_all(const char *from, size_t n)
{
	for (size_t done = 0; done < n;) {
		long put = sys_write(1, from + done, n - done);

		expect(!failed(put));
		done += (size_t)put;
	}
}

/* take_number removes a four-byte number from the question. */
static uint32_t take_number(struct text *q)
{
	uint32_t n = 0;

	expect(q->len >= 4);
	for (int i = 0; i < 4; i++)
		n = n << 8 | (unsigned char)q->at[i];
	q->at += 4;
	q->len -= 4;
	return n;
}

static void put_number(uint32_t n)
{
	char at[4] = {(char)(n >> 24), (char)(n >> 16), (char)(n >> 8), (char)n};

	line_bytes(&reply, at, sizeof(at));
}

/* ask_records: maximum, length of the pieces, space for records, bytes. The answer is the log. */
static void ask_records(struct text q)
{
	uint32_t max = take_number(&q), piece = take_number(&q), room = take_number(&q);
	struct text stamp = text_of("T");
	struct line out = {.at = allocate(room), .cap = room};
	struct encoder e;

	expect(encoder_init(&e, "stdout", (int)max));
	while (q.len > 0) {
		size_t n = min(q.len, piece), done = 0;

		while (done < n) {
			out.len = 0;
			done += encoder_append(&e, &out, stamp, q.at + done, n - done);
			line_bytes(&reply, out.at, out.len);
		}
		q.at += n;
		q.len -= n;
	}
	encoder_flush(&e, &reply, stamp);
	free(e.held);
	free(out.at);
}

/* ask_time: seconds, nanoseconds. */
static void ask_time(struct text q)
{
	uint64_t high = take_number(&q), low = take_number(&q);

	line_time(&reply, (int64_t)(high << 32 | low), take_number(&q));
}

static void ask_exit_status(struct text q)
{
	int code;

	if (exit_status(q, &code))
		line_int(&reply, code);
}

static void ask_kills(struct text q)
{
	uint64_t kills;

	if (oom_kills(q, &kills))
		line_unsigned(&reply, kills, 10);
}

/* ask_record: code, signal, whether there was an OOM kill, time. */
static void ask_record(struct text q)
{
	uint32_t code = take_number(&q), signal = take_number(&q), oom_killed = take_number(&q);
	uint64_t high = take_number(&q), low = take_number(&q);
	struct exit_record r = {.code = (int)code,
		.signal = (int)signal,
		.oom_killed = oom_killed != 0,
		.at = (int64_t)(high << 32 | low)};

	exit_record_encode(&reply, &r);
}

static void line_flag(bool b) { line_text(&reply, b ? "true\n" : "false\n"); }

static void line_number(int n)
{
	line_int(&reply, n);
	line_text(&reply, "\n");
}

static void line_string(const char *s)
{
	line_text(&reply, s);
	line_text(&reply, "\n");
}

/* ask_params: zero-terminated arguments. The answer is the values, one per line, or nothing. */
static void ask_params(struct text q)
{
	char *argv[64];
	struct params p;
	int argc = 0;

	for (struct text arg; argc < 64 && q.len > 0 && text_cut(&q, 0, &arg); argc++)
		argv[argc] = (char *)arg.at;
	if (!params_parse(&p, argc, argv))
		return;
	line_string(p.id);
	line_string(p.dir);
	line_string(p.log_dir);
	line_string(p.log_path);
	line_number(p.max_line);
	line_number(p.init_pid);
	line_flag(p.stdin_once);
	line_flag(p.orphans);
	line_string(p.kill_dir);
	const int fds[] = {p.init, p.listen, p.log, p.stdin, p.stdout, p.stderr, p.console, p.verdict, p.oom,
		p.oom_notify, p.oom_parent, p.gate};
	for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
		line_number(fds[i]);
}

/* collect reads all available bytes. */
static void collect(int fd, struct buffer *to)
{
	char buf[4096];
	long n;

	while ((n = sys_read(fd, buf, sizeof(buf))) > 0)
		expect(buffer_append(to, buf, (size_t)n));
}

/* talk makes the monitor handle all events, and reads its output to the client and the
 * container. */
static void talk(struct monitor *m, int client, int stdin, struct buffer *answers, struct buffer *input)
{
	struct epoll_event events[16];
	long n;

	while ((n = sys_epoll_wait(m->epoll, events, 16, 0)) > 0) {
		monitor_round(m, events, n);
		for (int i = 0; i < m->client_count; i++)
			expect(m->clients[i].in.len <= HEADER_SIZE + MAX_PAYLOAD &&
				m->clients[i].queue.len <= MAX_QUEUED);
	}
	collect(client, answers);
	collect(stdin, input);
}

/* say makes a client send bytes in pieces and disconnect. */
static void say(struct monitor *m, int client, int stdin, struct text q, uint32_t piece, struct buffer *answers,
	struct buffer *input)
{
	size_t rounds = q.len / 4096 + 8; /* stdin's pipe holds 4096 bytes */

	while (q.len > 0) {
		long n = sys_send(client, q.at, min(q.len, piece));

		if (failed(n) && n != -EAGAIN)
			break; /* the monitor has closed the connection */
		if (n > 0) {
			q.at += n;
			q.len -= (size_t)n;
		}
		talk(m, client, stdin, answers, input);
	}
	SYS2(shutdown, client, SHUT_WR);
	while (rounds-- > 0)
		talk(m, client, stdin, answers, input);
}

/* ask_client: whether stdin closes with its first client, length of the pieces, bytes. The
 * answer is whether the client is gone at the end, the length of the answers to it, these, and
 * the container's input. */
static void ask_client(struct text q)
{
	static struct monitor m;
	struct buffer answers = {0}, input = {0};
	bool once = take_number(&q) != 0;
	uint32_t piece = take_number(&q);
	int pipe[2], ends[2];

	expect(!failed(SYS2(pipe2, pipe, O_CLOEXEC | O_NONBLOCK)));
	expect(!failed(sys_fcntl(pipe[1], F_SETPIPE, 4096)));
	expect(!failed(SYS4(socketpair, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends)));
	m = (struct monitor){
		.params = {.log_path = "", .init = -1, .listen = -1, .console = -1, .stdin_once = once},
		.epoll = (int)sys_epoll_create(),
		.children = -1,
		.log = -1,
		.stdin = pipe[1],
		.oom = {.file = -1, .notify = -1, .parent = -1},
		.freezer = {.dir = -1},
		.clients = {{.fd = ends[0]}},
		.client_count = 1,
	};
	expect(m.epoll >= 0 && !failed(watch(&m, ends[0], EPOLLIN)));
	say(&m, ends[1], pipe[0], q, piece, &answers, &input);
	put_number(m.client_count == 0);
	put_number((uint32_t)answers.len);
	line_bytes(&reply, buffer_at(&answers), answers.len);
	line_bytes(&reply, buffer_at(&input), input.len);
	buffer_free(&answers);
	buffer_free(&input);
	for (int i = 0; i < m.client_count; i++)
		m.clients[i].dead = true;
	clients_sweep(&m);
	buffer_free(&m.pending);
	if (m.stdin >= 0)
		sys_close(m.stdin);
	sys_close(pipe[0]);
	sys_close(ends[1]);
	sys_close(m.epoll);
}

/* ask_zombie: the content of a /proc/PID/stat. The answer is the status, nothing if there is
 * none. */
static void ask_zombie(struct text q)
{
	int status;

	if (zombie_status(q, &status))
		line_int(&reply, status);
}

/* next_event returns epoll's first event. */
static struct epoll_event next_event(const struct monitor *m)
{
	struct epoll_event e = {0};

	expect(sys_epoll_wait(m->epoll, &e, 1, 0) == 1);
	return e;
}

/* connect_to returns a client's end of a connection that is not accepted yet. */
static int connect_to(const char *address, unsigned int size)
{
	long fd = SYS3(socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	expect(!failed(fd) && !failed(SYS3(connect, fd, address, size)));
	return (int)fd;
}

/*
 * ask_stale evicts the oldest client, lets a new one get its descriptor, and then passes the
 * monitor an event of the old one. The answer is whether the new one has that descriptor, and
 * whether it is gone.
 */
static void ask_stale(void)
{
	static struct monitor m;
	int ends[MAX_CLIENTS + 2], number;
	char address[128] = {AF_UNIX, 0};
	unsigned int size = 2; /* the kernel chooses a name */
	struct epoll_event old;
	struct client *last;

	m = (struct monitor){
		.params = {.log_path = "",
			.init = -1,
			.listen = (int)SYS3(socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0),
			.console = -1},
		.epoll = (int)sys_epoll_create(),
		.children = -1,
		.log = -1,
		.stdin = -1,
		.oom = {.file = -1, .notify = -1, .parent = -1},
		.freezer = {.dir = -1},
	};
	expect(!failed(SYS3(bind, m.params.listen, address, size)) && !failed(SYS2(listen, m.params.listen, 8)));
	size = sizeof(address);
	expect(!failed(SYS3(getsockname, m.params.listen, address, &size)));
	for (int i = 0; i < MAX_CLIENTS; i++) {
		ends[i] = connect_to(address, size);
		client_accept(&m);
	}
	number = m.clients[0].fd;
	SYS2(shutdown, ends[0], SHUT_WR);
	old = next_event(&m);
	for (int i = MAX_CLIENTS; i < MAX_CLIENTS + 2; i++)
		ends[i] = connect_to(address, size);
	client_accept(&m); /* it evicts the oldest client */
	client_accept(&m);
	old.events |= EPOLLHUP;
	monitor_round(&m, &old, 1);
	last = &m.clients[m.client_count - 1];
	put_number(last->fd == number);
	put_number(last->gone || last->dead);
	for (int i = 0; i < m.client_count; i++)
		m.clients[i].dead = true;
	clients_sweep(&m);
	for (int i = 0; i < MAX_CLIENTS + 2; i++)
		sys_close(ends[i]);
	sys_close(m.params.listen);
	sys_close(m.epoll);
}

/* ask_kill_tree: a directory. The answer is whether it is empty at the end. */
static void ask_kill_tree(struct text q)
{
	char path[4096];

	expect(q.len < sizeof(path));
	memcpy(path, q.at, q.len);
	path[q.len] = 0;
	put_number(kill_tree(path, MILLISECOND));
}

static void answer(char kind, struct text q)
{
	switch (kind) {
	case 'l': ask_records(q); break;
	case 't': ask_time(q); break;
	case 'x': ask_exit_status(q); break;
	case 'o': ask_kills(q); break;
	case 'r': ask_record(q); break;
	case 'p': ask_params(q); break;
	case 'c': ask_client(q); break;
	case 'z': ask_zombie(q); break;
	case 'e': ask_stale(); break;
	case 'k': ask_kill_tree(q); break;
	default: expect(false);
	}
}

int main(void)
{
	char header[5];

	reply = (struct line){.at = allocate(2 * LONGEST), .cap = 2 * LONGEST};
	while (read_all(header, sizeof(header))) {
		struct text size = {header + 1, 4};
		uint32_t n = take_number(&size);
		char *bytes; /* exactly that size, so that the sanitizer notices reads beyond it */

		expect(n <= LONGEST);
		bytes = allocate(n);
		expect(read_all(bytes, n));
		reply.len = 0;
		put_number(0);
		answer(header[0], (struct text){bytes, n});
		free(bytes);
		expect(reply.len < reply.cap);
		n = (uint32_t)reply.len - 4;
		for (int i = 0; i < 4; i++)
			reply.at[i] = (char)(n >> (24 - 8 * i));
		write_all(reply.at, reply.len);
	}
	return 0;
}
