#include "monitor.h"

/* How long processes may take to die that a shared PID namespace let outlive init. Whoever removes the container tries again. */
#define KILL_PATIENCE (2 * SECOND)

bool reap(struct monitor *m)
{
	for (;;) {
		int status;
		long pid = sys_wait4(-1, &status, WNOHANG);

		if (pid == -EINTR)
			continue;
		if (pid <= 0)
			return pid == 0;
		if (pid == m->params.init_pid) {
			m->init_ended = true;
			m->init_status = status;
			m->init_end = now(CLOCK_REALTIME);
		}
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
	if (!text_cut(&t, '}', &object)) /* what was written was cut off */
		return false;
	text_cut(&object, ',', &number);
	if (!text_unsigned(text_trim(number), 255, &n))
		return false;
	*code = (int)n;
	return true;
}

/* read_verdict reads what was written by a process that waited for the container: {"id": ID, "exitStatus": N}. */
static bool read_verdict(int fd, int *code)
{
	char buf[512];
	long n;

	if (failed(set_nonblock(fd)))
		return false;
	n = sys_read(fd, buf, sizeof(buf));
	return n > 0 && exit_status((struct text){buf, (size_t)n}, code);
}

/* verdict tells how the container ended. False: nobody knows. */
static bool verdict(struct monitor *m, struct exit_record *exit)
{
	int signal = m->init_status & 0x7f; /* as wait4 has it */

	oom_read(m);
	*exit = (struct exit_record){.oom_killed = m->oom.kills > 0, .at = m->init_end};
	if (m->params.verdict >= 0)
		return read_verdict(m->params.verdict, &exit->code);
	exit->signal = signal;
	exit->code = signal != 0 ? 128 + signal : m->init_status >> 8 & 0xff;
	return true;
}

/*
 * end_orphans kills what init has left and waits for it. On cgroup v2 a process is no member any more a moment before it
 * can be reaped.
 */
static void end_orphans(struct monitor *m)
{
	int64_t deadline = now(CLOCK_MONOTONIC) + KILL_PATIENCE;

	REACH("monitor.kill-orphans");
	kill_tree(m->params.kill_dir, KILL_PATIENCE);
	while (reap(m) && now(CLOCK_MONOTONIC) < deadline)
		sleep_for(MILLISECOND);
	REACH("monitor.orphans-ended");
}

/* record_exit tries for a while: without the record the container counts as lost. */
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

/* The verdict comes first, while the cgroup exists; then the output; the record last, since it says that all is done. */
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
	if (known) { /* else whoever reads no record sees to it that nothing is left */
		result = record_exit(m, &exit);
		REACH("monitor.exit-recorded");
	}
	say_farewell(m);
	REACH("monitor.farewell-said");
	return failed(result) ? 1 : 0;
}
