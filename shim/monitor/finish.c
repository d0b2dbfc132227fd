#include "monitor.h"

/* Bounds the wait for processes that outlive init in a shared PID namespace. Processes that survive
 * it are killed when the container is removed. */
#define KILL_PATIENCE (2 * SECOND)

static void note_end(struct monitor *m, int status)
{
	m->init_ended = true;
	m->init_status = status;
	m->init_end = now(CLOCK_REALTIME);
}

bool reap(struct monitor *m)
{
	for (;;) {
		int status;
		long pid = sys_wait4(-1, &status, WNOHANG);

		if (pid == -EINTR)
			continue;
		if (pid <= 0)
			return pid == 0;
		if (pid == m->params.init_pid)
			note_end(m, status);
	}
}

bool zombie_status(struct text stat, int *status)
{
	struct text field;
	uint64_t n;

	/* "PID (NAME) STATE ...": the name may hold anything, so fields are counted after the
	 * last ')'. */
	if (!text_after(&stat, ")"))
		return false;
	while (text_after(&stat, ")"))
		;
	if (stat.len == 0 || stat.at[stat.len - 1] != '\n')
		return false;
	stat.len--;
	if (!text_cut(&stat, ' ', &field) || field.len != 0)
		return false;
	for (int i = 3; i < 52; i++) /* field 52, the last one since Linux 3.5, is the status */
		if (!text_cut(&stat, ' ', &field) || (i == 3 && !text_equals(field, "Z")))
			return false;
	text_cut(&stat, ' ', &field);
	if (!text_unsigned(field, 0xffff, &n))
		return false;
	*status = (int)n;
	return true;
}

/* proc_path writes /proc/PID/NAME. */
static void proc_path(char *to, size_t size, int pid, const char *name)
{
	struct line l = {.at = to, .cap = size - 1};

	line_text(&l, "/proc/");
	line_int(&l, pid);
	line_text(&l, "/");
	line_text(&l, name);
	to[l.len] = 0;
}

/* may_see returns whether the kernel shows a process's exit status. A reader that may not ptrace
 * the process sees status 0, and cannot read /proc/PID/ns/pid either. So that link is the test. */
static bool may_see(int pid)
{
	char path[64], target[64];

	proc_path(path, sizeof(path), pid, "ns/pid");
	return !failed(SYS4(readlinkat, AT_FDCWD, path, target, sizeof(target)));
}

/* read_zombie reads the status of a process that has ended. The caller makes sure that it has not
 * been reaped, so that its pid was not reused. */
static bool read_zombie(int pid, int *status)
{
	char path[64], stat[2048];
	long fd, n;

	proc_path(path, sizeof(path), pid, "stat");
	fd = sys_openat(AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (failed(fd))
		return false;
	n = sys_read((int)fd, stat, sizeof(stat));
	sys_close((int)fd);
	return !failed(n) && zombie_status((struct text){stat, (size_t)n}, status) && may_see(pid);
}

/*
 * await_tracer waits for SIGCHLD, which the kernel sends when init's tracer detaches. The pidfd
 * would be ready all the time. If there is no signalfd, the function only sleeps for a moment, and
 * the caller polls.
 */
static void await_tracer(struct monitor *m)
{
	if (failed(watch_children(m))) {
		sleep_for(10 * MILLISECOND);
		return;
	}
	forget(m, m->params.init);
	reap(m); /* SIGCHLD may have come before the signalfd existed */
}

/* pidfd_info is struct pidfd_info of linux/pidfd.h. */
struct pidfd_info {
	uint64_t mask, cgroup;
	uint32_t ids[11];
	int32_t exit_code;
};

#define PIDFD_GET_INFO 0xc040ff0b /* _IOWR(0xff, 11, struct pidfd_info) */
#define PIDFD_INFO_EXIT 8

/* reaped_status reads the status of a process that has been reaped, which the kernel keeps for its
 * pidfds (Linux 6.15). */
static bool reaped_status(int pidfd, int *status)
{
	struct pidfd_info info = {.mask = PIDFD_INFO_EXIT};

	if (failed(sys_ioctl(pidfd, PIDFD_GET_INFO, (long)&info)) || (info.mask & PIDFD_INFO_EXIT) == 0)
		return false;
	*status = info.exit_code;
	return true;
}

/*
 * foreign_status finds out the status of an init that is not a child. Its launcher, or process 1,
 * reaps it at any time. Before that, the status is in /proc, afterwards in the pidfd. A process
 * that was not reaped after its zombie was read was that zombie. It returns false if the status is
 * lost.
 */
static bool foreign_status(const struct params *p, int *status)
{
	for (;; sleep_for(MILLISECOND)) {
		int seen = 0;
		bool zombie = read_zombie(p->init_pid, &seen);

		REACH("monitor.zombie-read");
		if (reaped_status(p->init, status))
			return true;
		REACH("monitor.not-reaped");
		/* The kernel notes the status before the process disappears. */
		if (SYS4(pidfd_send_signal, p->init, 0, 0, 0) == -ESRCH)
			return reaped_status(p->init, status);
		if (zombie) {
			*status = seen;
			return true;
		}
	}
}

/*
 * A process of another container in a shared PID namespace may trace init and never wait for it.
 * Then wait4 does not return init's status while the tracer lives. /proc/PID/stat has it.
 */
void init_unreaped(struct monitor *m)
{
	int status = 0;
	long result = sys_wait4(m->params.init_pid, &status, WNOHANG);

	if (result == m->params.init_pid) {
		note_end(m, status);
	} else if (result == -ECHILD) {
		m->init_lost = !foreign_status(&m->params, &status);
		note_end(m, status);
	} else if (read_zombie(m->params.init_pid, &status)) {
		note_end(m, status);
		m->init_zombie = true;
	} else {
		await_tracer(m);
	}
}

bool exit_status(struct text t, int *code)
{
	struct text object, number;
	uint64_t n;

	if (!text_after(&t, "\"exitStatus\""))
		return false;
	t = text_trim(t);
	if (t.len == 0 || t.at[0] != ':')
		return false;
	t.at++;
	t.len--;
	if (!text_cut(&t, '}', &object)) /* the text is incomplete */
		return false;
	text_cut(&object, ',', &number);
	if (!text_unsigned(text_trim(number), 255, &n))
		return false;
	*code = (int)n;
	return true;
}

/* read_verdict reads the output of a process that waited for the container:
 * {"id": ID, "exitStatus": N, "oomKilled": true}. The last is optional. */
static bool read_verdict(int fd, struct exit_record *exit)
{
	struct text said;
	char buf[512];
	long n;

	if (failed(set_nonblock(fd)))
		return false;
	n = sys_read(fd, buf, sizeof(buf));
	if (n <= 0 || !exit_status((struct text){buf, (size_t)n}, &exit->code))
		return false;
	said = (struct text){buf, (size_t)n};
	exit->oom_killed |= text_after(&said, "\"oomKilled\": true");
	return true;
}

/* verdict finds out how the container ended. It returns false if that is unknown. */
static bool verdict(struct monitor *m, struct exit_record *exit)
{
	int signal = m->init_status & 0x7f; /* as wait4 returns it */

	oom_read(m);
	*exit = (struct exit_record){.oom_killed = m->oom.kills > 0, .at = m->init_end};
	if (m->params.verdict >= 0)
		return read_verdict(m->params.verdict, exit);
	if (m->init_lost)
		return false;
	exit->signal = signal;
	exit->code = signal != 0 ? 128 + signal : m->init_status >> 8 & 0xff;
	return true;
}

/*
 * end_orphans kills init's orphans and waits for their end. On cgroup v2 a process leaves the
 * cgroup a moment before it can be reaped.
 */
static void end_orphans(struct monitor *m)
{
	int64_t deadline = now(CLOCK_MONOTONIC) + KILL_PATIENCE;

	REACH("monitor.kill-orphans");
	kill_tree(m->params.kill_dir, KILL_PATIENCE);
	while (reap(m) && !m->init_zombie && now(CLOCK_MONOTONIC) < deadline)
		sleep_for(MILLISECOND);
	REACH("monitor.orphans-ended");
}

/* record_exit retries for a while, because without the record the container counts as lost. */
static long record_exit(struct monitor *m, const struct exit_record *exit)
{
	REACH("monitor.record-exit");
	for (int attempt = 0;; attempt++) {
		long result = exit_record_write(m->params.dir, exit);

		if (!failed(result) || attempt == 10 || result == -ENOENT)
			return result;
		sleep_for(100 * MILLISECOND);
	}
}

/* The verdict comes first, while the cgroup exists, then the output. The record is last, because it
 * says that everything is done. */
int finish(struct monitor *m)
{
	struct exit_record exit;
	bool known;
	long result = -ENODATA;

	REACH("monitor.init-ended");
	known = verdict(m, &exit);
	if (m->params.kill_dir[0] != 0)
		end_orphans(m);
	for (int i = 0; i < m->stream_count; i++)
		stream_drain(m, &m->streams[i]);
	log_flush(m);
	REACH("monitor.output-logged");
	if (known) { /* otherwise the daemon finds no record and cleans up */
		result = record_exit(m, &exit);
		REACH("monitor.exit-recorded");
	}
	clients_farewell(m);
	REACH("monitor.farewell-said");
	return failed(result) ? 1 : 0;
}
