/*
 * monitor watches over one container. A launcher (package shim/launcher) replaces itself with it by
 * execve when the container runs, so the container's init is this process's child. The command line
 * (shim/proto, MonitorParams) names the files that it inherits.
 *
 * It writes the container's output to the log in CRI format and to attached clients, passes input
 * to its stdin, and reaps every process that becomes its child. After init's end it writes the exit
 * record and exits. No failure here, such as a full disk, may block the container.
 *
 * Only slow clients block it, as with containerd and conmon, because they must get every byte. A
 * client that takes nothing for PATIENCE while the container waits is disconnected.
 *
 * There is one monitor per container, so it must be small. One thread waits in epoll, and an idle
 * monitor has written only to its stack and a few pages. It is in C, because a Go program that does
 * nothing takes half a megabyte.
 *
 * It reads foreign bytes from three sources. The first is the container's output, which it only
 * copies (logfmt.c). The second is its clients' frames (queue.c, client.c). The third is texts of
 * OCI runtimes and the kernel (finish.c, oom.c, killtree.c). Package shim/monitor/test tests and
 * fuzzes all of them under the sanitizers.
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

/* params are the monitor's parameters. See proto.MonitorParams for each of them. */
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

	/* File descriptors, -1 if there is none. */
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
	int gate;
};

/* params_parse parses the command line without the program's name. It returns false if
 * proto.MonitorParams.Args has not made it. */
bool params_parse(struct params *p, int argc, char **argv);
/* params_fds calls f for each inherited file descriptor. */
void params_fds(const struct params *p, void (*f)(int fd));

/* The frames of Dir/sock. shim/proto/frame.go documents them. */
enum {
	HEADER_SIZE = 5,
	MAX_PAYLOAD = 32 << 10,

	FRAME_ATTACH = 1,
	FRAME_STDIN,
	FRAME_STDIN_EOF,
	FRAME_RESIZE,
	FRAME_REOPEN,
	FRAME_CLOSE_STDIN,
	FRAME_FREEZE,
	FRAME_THAW,

	FRAME_OK = 16,
	FRAME_ERROR,
	FRAME_STDOUT,
	FRAME_STDERR,
	FRAME_END,

	WANT_STDIN = 1,
	WANT_STDOUT = 2,
	WANT_STDERR = 4,
	WANT_END = 8, /* the client is attached and has missed no output, so it gets FRAME_END */

	ANNOUNCES_END = 1, /* in the answer to FRAME_ATTACH */
};

/* PATIENCE is how long a client that takes nothing may block the container. */
#ifndef PATIENCE
#define PATIENCE (600 * SECOND)
#endif

enum {
	/* Bytes that are queued for all clients together. Above the first limit the container's
	 * output is not read. Answers and the output after init's end can reach the second limit. Above
	 * it, the client with the longest queue is disconnected. Clients that do not read must not cost
	 * more memory, however many they are. */
	FULL_QUEUES = 4 << 20,
	MAX_QUEUED = 8 << 20,
	MAX_CLIENTS = 64, /* bounds the memory for connections */
	MAX_STREAMS = 2,
};

/* client is one connection to Dir/sock. */
struct client {
	int fd;
	uint32_t serial; /* of the connection; distinguishes events of an earlier connection with the same descriptor */
	struct buffer in;    /* received, not yet processed */
	struct buffer queue; /* to be sent */
	int64_t progress;    /* monotonic time at which the queue began, or at which the socket last took data */
	unsigned char wants; /* WANT_... */
	bool attached;
	bool ended; /* it sends no more */
	bool gone;  /* it has disconnected */
	bool dead;  /* clients_sweep removes it */
};

/* stream is the container's stdout, stderr or terminal. */
struct stream {
	int fd;
	unsigned char frame_type;
	struct encoder encoder;
};

/* oom counts the kills of the OOM killer; see oom.c. */
struct oom {
	int file, notify, parent; /* -1: none */
	uint64_t kills, parent_kills;
};

/* THAW_REPEATS is how often a thaw is repeated; see freeze.c. */
enum { THAW_REPEATS = 5 };

/* freezer freezes the container's cgroup for one client; see freeze.c. */
struct freezer {
	int dir;         /* the cgroup's directory, -1: not in use */
	bool v1;         /* the cgroup belongs to the freezer of v1 */
	bool frozen;     /* the client has its answer */
	uint32_t client; /* serial number of the client's connection; 0: the cgroup is thawed */
	int64_t until;   /* monotonic time of the automatic thaw, or of its next repetition */
	int repeats;     /* repetitions of the thaw so far */
};

struct monitor {
	struct params params;
	int epoll;
	int children; /* signalfd of SIGCHLD, -1: this process has no other children */

	int log; /* -1: no log */
	struct line records;

	struct stream streams[MAX_STREAMS];
	int stream_count;

	struct client clients[MAX_CLIENTS]; /* oldest first */
	int client_count;
	uint32_t last_serial; /* of the last accepted connection, 0: none */
	int64_t full_since;   /* monotonic time at which the queues became full; 0: they are not, output is read */
	int64_t accept_again; /* monotonic time at which accepting continues; 0: it is not paused */

	int stdin;             /* -1: there is none, or it is closed */
	struct buffer pending; /* input that the container has not read; clients wait meanwhile */
	bool stdin_closing;    /* close it when pending is written */

	struct oom oom;
	struct freezer freezer;

	bool init_ended;
	bool init_lost;   /* its status is unknown */
	bool init_zombie; /* it cannot be reaped until its tracer detaches */
	int init_status;  /* as wait4 returns it */
	int64_t init_end; /* unix nanoseconds */
};

/* The functions of each file. A file calls only files that are below it in this list: */

/* loop.c */

/* monitor_init takes over the files of p. It returns 0 or -errno. */
long monitor_init(struct monitor *m, const struct params *p);
/* monitor_run handles events until init has ended, and finishes. It returns the exit code. */
int monitor_run(struct monitor *m);
/* monitor_round handles n events, and then what may be due after any event. */
void monitor_round(struct monitor *m, const struct epoll_event *events, long n);

/* finish.c */

/* reap reaps children that have ended: init, and orphans. It returns whether others are left. */
bool reap(struct monitor *m);
/* init_unreaped handles the end of an init that reap could not reap. */
void init_unreaped(struct monitor *m);
/* zombie_status parses the status, as of wait4, from the /proc/PID/stat of a process that has
 * ended. It returns false if the process has not ended, or for other text. */
bool zombie_status(struct text stat, int *status);
/* finish does the work after init's end. It returns the exit code. */
int finish(struct monitor *m);
/* exit_status parses "exitStatus": N from the output of a process that waited for the container. */
bool exit_status(struct text t, int *code);

/* client.c */

/* client_accept accepts one connection. Without a descriptor or memory for it, accepting pauses. */
void client_accept(struct monitor *m);
/* clients_accept_again ends that pause when it is due. */
void clients_accept_again(struct monitor *m);
void client_serve(struct monitor *m, struct client *c, uint32_t events);
/* clients_resume continues requests that waited for the container. */
void clients_resume(struct monitor *m);
/* clients_sweep removes dead clients. */
void clients_sweep(struct monitor *m);

/* stdin.c */

void stdin_write(struct monitor *m, const char *data, size_t n);
/* stdin_flush continues when the container is ready for more input. It returns whether the requests
 * of clients need not wait any longer. */
bool stdin_flush(struct monitor *m);
/* stdin_close closes the container's stdin after the pending input. A terminal stays open, because
 * users end its input by a key. */
void stdin_close(struct monitor *m);
/* resize changes the terminal's size. It returns NULL, or the reason of a failure. */
const char *resize(struct monitor *m, const char *payload, size_t n);

/* output.c */

/* stream_read copies one read of output to the log and the clients. It returns its length, 0 if
 * there is no output now or ever. */
size_t stream_read(struct monitor *m, struct stream *s);
/* stream_watch waits for output unless the clients' queues are full, and for space for pending
 * input if the stream is the terminal. */
void stream_watch(struct monitor *m, const struct stream *s);
/* output_pace stops reading output when the clients' queues are full, and continues later. */
void output_pace(struct monitor *m);
/* stream_drain reads the output that init has left in its pipe. */
void stream_drain(struct monitor *m, struct stream *s);
/* log_flush writes incomplete lines. */
void log_flush(struct monitor *m);
/* log_reopen opens the log again after a rotation. It returns NULL, or the reason of a failure.
 * After a failure the old file stays in use, and no new file exists. */
const char *log_reopen(struct monitor *m);

/* freeze.c */

/* freeze begins to freeze the cgroup that a client's request names. It returns NULL, or the reason
 * of a failure. The answer to the client follows when the cgroup is frozen. */
const char *freeze_begin(struct monitor *m, struct client *c, const char *payload, size_t n);
/* freeze_end thaws the cgroup that the client has frozen. It returns NULL, or the reason of a
 * failure. */
const char *freeze_end(struct monitor *m, const struct client *c);
/* freeze_continue answers the client when the cgroup is frozen, thaws the cgroup when its time is
 * over, and repeats earlier thaws. */
void freeze_continue(struct monitor *m);
/* freeze_pause returns the time until freeze_continue has work, in milliseconds, -1: none. */
int freeze_pause(const struct monitor *m);
/* freeze_cancel thaws a frozen cgroup because the container has ended. */
void freeze_cancel(struct monitor *m);

/* oom.c */

void oom_watch(struct monitor *m);
/* oom_read updates the count. When the cgroup does not exist any more, it keeps the last count. */
void oom_read(struct monitor *m);
/* oom_kills parses the line "oom_kill N" of memory.events (v2) or memory.oom_control (v1 since
 * Linux 4.13). */
bool oom_kills(struct text data, uint64_t *kills);

/* queue.c */

/* frame_header writes the header of a frame with n bytes of payload. */
void frame_header(char *to, unsigned char type, size_t n);
/* frame_next returns the length of the first frame of in, 0 if it is incomplete, -1 if it is too
 * long. */
long frame_next(const struct buffer *in);
/* stdin_must_wait returns whether the container has not read earlier input yet. */
static inline bool stdin_must_wait(const struct monitor *m) { return m->pending.len > 0; }
/* client_waits returns whether the client's next request is complete but has to wait. */
bool client_waits(const struct monitor *m, const struct client *c);
/* client_watch waits for input unless a request is waiting, and for space in the socket if output
 * is queued. */
void client_watch(struct monitor *m, struct client *c);
/* client_lost marks a client that cannot be sent to. Its earlier requests still count. */
void client_lost(struct client *c);
/* client_drop disconnects a client that misses output from now on. */
void client_drop(struct client *c, const char *why);
/* client_send_queue sends as much of the queue as the socket takes. */
void client_send_queue(struct client *c);
/* client_answer answers a client's request: success if why is NULL, otherwise the reason of a
 * failure. */
void client_answer(struct monitor *m, struct client *c, const char *why);
/* client_reply sends an answer to a client. It truncates an answer that is too long. */
void client_reply(struct monitor *m, struct client *c, unsigned char type, const char *payload, size_t n);
/* broadcast sends a frame of output to all clients that asked for it. */
void broadcast(struct monitor *m, unsigned char type, const char *data, size_t n);
/* clients_full returns whether no more output should be read for now. */
bool clients_full(const struct monitor *m);
/* clients_drop_stalled disconnects the clients that have blocked the container for too long. */
void clients_drop_stalled(struct monitor *m);
/* clients_farewell tells the clients that the container has ended. */
void clients_farewell(struct monitor *m);

/* events.c */

/* frame is the buffer of every read, with space for a header before it. It takes no memory until it
 * is used. */
extern char frame[HEADER_SIZE + MAX_PAYLOAD];
/* event_data returns epoll's data for a descriptor: the connection's serial number, 0 for other
 * descriptors, and the descriptor. */
static inline uint64_t event_data(int fd, uint32_t serial) { return (uint64_t)serial << 32 | (uint32_t)fd; }
/* watch adds fd to epoll, or changes its events. forget removes it, if it is there. */
long watch(struct monitor *m, int fd, uint32_t events);
/* watch_connection is watch for the connection with that serial number. */
long watch_connection(struct monitor *m, int fd, uint32_t serial, uint32_t events);
void forget(struct monitor *m, int fd);
/* set_nonblock returns 0 or -errno. */
long set_nonblock(int fd);
/* watch_children makes a descriptor report the end of every child. It returns 0 or -errno. */
long watch_children(struct monitor *m);

/* record.c */

/* exit_record is proto.Exit. */
struct exit_record {
	int code;   /* exit code, or 128+signal */
	int signal; /* 0 if it exited without a signal */
	bool oom_killed;
	int64_t at; /* unix nanoseconds */
};

/* exit_record_encode writes the file's content, with a checksum, to l. */
void exit_record_encode(struct line *l, const struct exit_record *r);
/* exit_record_write writes the record to dir by rename, so readers see none or all of it. It
 * returns 0 or -errno. */
long exit_record_write(const char *dir, const struct exit_record *r);

/* logfile.c */

/* logfile_open opens the log file at path, below dir, for appending. It returns the descriptor,
 * or -1 and the reason. */
int logfile_open(const char *dir, const char *path, struct line *why);

/* killtree.c */

/* kill_tree kills all processes in the cgroup directory and below, repeatedly until none is left
 * or the patience is over. It returns whether none is left. */
bool kill_tree(const char *dir, int64_t patience);
/* file_write writes text to an existing file of the directory. It returns 0 or -errno. */
long file_write(int dir, const char *name, const char *text);
/* file_begins returns whether a file's content begins with text. */
bool file_begins(int dir, const char *name, const char *text);

/* time.c */

#define SECOND ((int64_t)1000000000)
#define MILLISECOND ((int64_t)1000000)

/* now returns a clock's time, in nanoseconds. */
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
