/*
 * monitor watches over one container. A launcher (package shim/launcher) executes it in
 * its own place when the container runs, so the container's init is this process's
 * child. The command line (shim/proto, MonitorParams) names what it inherits.
 *
 * It writes the container's output to the log in CRI format and to attached clients,
 * feeds its stdin, reaps every process that becomes its child, and when init has ended
 * writes the exit record and ends. Nothing that fails here (a full disk, a slow client)
 * may hold up the container.
 *
 * There is one monitor per container, so it is small: one thread waits in epoll, and all
 * that an idle one has written to is its stack and a few pages. That is why it is in C:
 * a Go program that does nothing has half a megabyte.
 *
 * What it reads of others' bytes is the container's output, which it only copies
 * (logfmt.c), its clients' frames (client.c), and the texts that a runtime's program and
 * the kernel write (finish.c, oom.c, killtree.c). All of that is tested and fuzzed by
 * package shim/monitor/test, under the sanitizers.
 */
#ifndef MONITOR_H
#define MONITOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buffer.h"
#include "logfmt.h"
#include "sys.h"
#include "text.h"

/* params is everything a monitor starts with: handoff.Params, which tells what each is. */
struct params {
	const char *id;
	const char *dir;
	const char *log_dir;
	const char *log_path;
	int max_line;
	int init_pid;
	bool stdin_once;
	bool orphans;
	const char *kill_dir;

	/* File descriptors, -1 for those that there are not. */
	int init;
	int listen;
	int log;
	int stdin;
	int stdout;
	int stderr;
	int console;
	int verdict;
	int oom;
	int oom_notify;
	int oom_parent;
};

/* params_parse reads the command line, without the program's name. False: it is not what handoff.Params.Args makes. */
bool params_parse(struct params *p, int argc, char **argv);
/* params_fds calls f for each file descriptor that is inherited. */
void params_fds(const struct params *p, void (*f)(int fd));

/* The protocol of Dir/sock: shim/proto, frame.go, says what the frames mean. */
enum {
	HEADER_SIZE = 5,
	MAX_PAYLOAD = 32 << 10,

	FRAME_ATTACH = 1,
	FRAME_STDIN,
	FRAME_STDIN_EOF,
	FRAME_RESIZE,
	FRAME_REOPEN,
	FRAME_CLOSE_STDIN,

	FRAME_OK = 16,
	FRAME_ERROR,
	FRAME_STDOUT,
	FRAME_STDERR,

	WANT_STDIN = 1,
	WANT_STDOUT = 2,
	WANT_STDERR = 4,
};

enum {
	/* How many bytes may wait for all clients together; then the one that most of them wait for is dropped. A burst of
	 * output is faster than any reader, but those that do not read must not cost more, however many they are. */
	MAX_QUEUED = 4 << 20,
	MAX_CLIENTS = 64, /* bounds what connections can cost */
	MAX_STREAMS = 2,
};

/* client is one connection to Dir/sock. */
struct client {
	int fd;
	uint32_t serial;     /* of the connection: an event of an earlier one with the same descriptor is not this one's */
	struct buffer in;    /* received, not yet carried out */
	struct buffer queue; /* to be sent */
	unsigned char wants; /* WANT_... */
	bool attached;
	bool ended; /* it sends nothing any more */
	bool gone;  /* it has hung up */
	bool dead;  /* to be swept away */
};

/* stream is the container's stdout, stderr or terminal. */
struct stream {
	int fd;
	unsigned char frame_type;
	struct encoder encoder;
};

/* oom follows the count of processes that the OOM killer took; see oom.c. */
struct oom {
	int file, notify, parent; /* -1: none */
	uint64_t kills, parent_kills;
};

struct monitor {
	struct params params;
	int epoll;
	int children; /* signalfd of SIGCHLD, -1: nobody else becomes our child */

	int log; /* -1: no log */
	struct line records;

	struct stream streams[MAX_STREAMS];
	int stream_count;

	struct client clients[MAX_CLIENTS]; /* the oldest first */
	int client_count;
	uint32_t last_serial;  /* of the connections accepted so far, 0: none */
	int64_t accept_again;  /* when connections are accepted again, on the monotonic clock; 0: they are accepted */

	int stdin;             /* -1: there is none, or it is closed */
	struct buffer pending; /* what the container was not ready to take; clients wait meanwhile */
	bool stdin_closing;    /* close it when pending is written */

	struct oom oom;

	bool init_ended;
	bool init_lost;   /* nobody can tell how it ended */
	bool init_zombie; /* another process traces it: it cannot be reaped before that one lets go of it */
	int init_status;  /* as wait4 has it */
	int64_t init_end; /* unix nanoseconds */
};

/* frame is what every read goes to, with room for a header before it. Like all that is not written to it costs nothing. */
extern char frame[HEADER_SIZE + MAX_PAYLOAD];

/* loop.c */

/* monitor_init takes over what p names. It returns 0 or -errno. */
long monitor_init(struct monitor *m, const struct params *p);
/* monitor_run handles events until init has ended, and then finishes. It returns the exit code. */
int monitor_run(struct monitor *m);
/* handle acts on an event. data is what epoll keeps for it: event_data. */
void handle(struct monitor *m, uint64_t data, uint32_t events);
/* event_data composes what epoll keeps for a descriptor: the connection's serial number, 0 for what is no connection, and the descriptor. */
static inline uint64_t event_data(int fd, uint32_t serial) { return (uint64_t)serial << 32 | (uint32_t)fd; }
/* watch adds fd to epoll, or changes what is waited for. forget removes it; it may not be there. */
long watch(struct monitor *m, int fd, uint32_t events);
/* watch_connection is watch for the connection with that serial number. */
long watch_connection(struct monitor *m, int fd, uint32_t serial, uint32_t events);
void forget(struct monitor *m, int fd);
/* set_nonblock returns 0 or -errno. */
long set_nonblock(int fd);
/* watch_children has the end of every child reported by a descriptor. It returns 0 or -errno. */
long watch_children(struct monitor *m);

/* output.c */

/* stream_read takes one portion of output to the log and to the clients. It returns how much, 0 if there is nothing now or nothing any more. */
size_t stream_read(struct monitor *m, struct stream *s);
/* stream_drain reads what init left in its pipe. */
void stream_drain(struct monitor *m, struct stream *s);
/* log_flush writes the pieces of lines that are still held back. */
void log_flush(struct monitor *m);
/* log_reopen opens the log anew, after a rotation. It returns NULL, or why not: then the old file stays in use, and no new one is made. */
const char *log_reopen(struct monitor *m);

/* logfile.c */

/* logfile_open opens the log file at path, below dir, for appending. It returns the descriptor, or -1 and why. */
int logfile_open(const char *dir, const char *path, struct line *why);

/* client.c */

/* client_accept takes one connection. Where there is no descriptor or memory for it, accepting rests for a while. */
void client_accept(struct monitor *m);
/* clients_accept_again ends that rest when its time is over. */
void clients_accept_again(struct monitor *m);
void client_serve(struct monitor *m, struct client *c, uint32_t events);
/* clients_resume goes on with requests that waited for the container. */
void clients_resume(struct monitor *m);
/* clients_sweep removes dead clients. */
void clients_sweep(struct monitor *m);
/* broadcast sends a frame of output to everybody who wants it. */
void broadcast(struct monitor *m, unsigned char type, const char *data, size_t n);
/* say_farewell hands what is queued for clients to the kernel, which keeps it for them. */
void say_farewell(struct monitor *m);
/* frame_header writes the header of a frame with n bytes of payload. */
void frame_header(char *to, unsigned char type, size_t n);

/* stdin.c */

/* stdin_must_wait tells whether the container has not taken earlier input yet. */
static inline bool stdin_must_wait(const struct monitor *m) { return m->pending.len > 0; }
void stdin_write(struct monitor *m, const char *data, size_t n);
/* stdin_flush goes on when the container is ready for more. */
void stdin_flush(struct monitor *m);
/* stdin_close closes the container's stdin after what is pending. A terminal has no such end: a program in it is told by typing. */
void stdin_close(struct monitor *m);
/* resize changes the terminal's size; it returns NULL, or why not. */
const char *resize(struct monitor *m, const char *payload, size_t n);

/* oom.c */

void oom_watch(struct monitor *m);
/* oom_read takes the current count. When the cgroup is gone, the last one stands. */
void oom_read(struct monitor *m);
/* oom_kills finds the line "oom_kill N", which memory.events (v2) and memory.oom_control (v1 since Linux 4.13) have. */
bool oom_kills(struct text data, uint64_t *kills);

/* finish.c */

/* reap collects the children that have ended: init, and orphans. It tells whether there are others. */
bool reap(struct monitor *m);
/* init_unreaped handles the end of an init that reap has not collected. */
void init_unreaped(struct monitor *m);
/* zombie_status finds the status that wait4 would give in the /proc/PID/stat of a process that has ended. False: it has not, or this is no such text. */
bool zombie_status(struct text stat, int *status);
/* finish does what has to be done after init's end. It returns the exit code. */
int finish(struct monitor *m);
/* exit_status finds "exitStatus": N in what a process wrote that waited for the container and has ended. */
bool exit_status(struct text t, int *code);

/* record.c */

/* exit_record is record.Exit. */
struct exit_record {
	int code;   /* exit code, or 128+signal */
	int signal; /* 0 if it exited by itself */
	bool oom_killed;
	int64_t at; /* unix nanoseconds */
};

/* exit_record_encode composes the file's content, with a checksum. */
void exit_record_encode(struct line *l, const struct exit_record *r);
/* exit_record_write puts the record into dir by rename: a reader sees none or all of it. It returns 0 or -errno. */
long exit_record_write(const char *dir, const struct exit_record *r);

/* killtree.c */

/* kill_tree kills all processes in the cgroup directory and below, and looks again until none is left or patience is over. It tells whether none is left. */
bool kill_tree(const char *dir, int64_t patience);

/* time.c */

#define SECOND ((int64_t)1000000000)
#define MILLISECOND ((int64_t)1000000)

/* now returns nanoseconds of the clock. */
int64_t now(int clock);
void sleep_for(int64_t nanoseconds);

/* failpoint.c: package internal/failpoint, for test builds only. */

#ifdef FAILPOINTS
void failpoint_init(const char *program, char **environment);
void failpoint_reach(const char *name);
#define REACH(name) failpoint_reach(name)
#else
#define REACH(name) ((void)0)
#endif

#endif
