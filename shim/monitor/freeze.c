/*
 * A checkpoint needs a container that does not run. The monitor freezes it and not the daemon, so
 * that the death of the daemon or of CRIU cannot leave a frozen container. The cgroup is thawed
 * when the client asks for it, when its connection ends, when the limit of its request is over, and
 * when the container ends.
 *
 * CRIU also writes to the freezer. It thaws the cgroup to work on the processes, and freezes it
 * again at its end. A CRIU that ends late could freeze it after the thaw, so the thaw is repeated.
 */
#include "monitor.h"

enum {
	LIMIT_SIZE = 4,             /* bytes of the request's limit, in milliseconds; a path follows */
	LONGEST_LIMIT = 15 * 60000, /* in milliseconds: the limit for requests whose own limit is invalid */
	FREEZE_POLL = 1,            /* milliseconds between two looks whether the cgroup is frozen */
	LONGEST_WAIT = 60 * 60 * 1000,
};

/*
 * The times between a thaw and its repetitions. The long times are for a CRIU that continues after
 * the death of its launcher and of the daemon. A kill of CRIU at that moment could end a process of
 * the container.
 */
static const int64_t repeats_after[THAW_REPEATS] = {100 * MILLISECOND, SECOND, 10 * SECOND, 60 * SECOND, 300 * SECOND};

static void set_state(const struct freezer *f, bool freeze)
{
	if (f->v1)
		file_write(f->dir, "freezer.state", freeze ? "FROZEN" : "THAWED");
	else
		file_write(f->dir, "cgroup.freeze", freeze ? "1" : "0");
}

/* is_frozen returns whether all processes of the cgroup are frozen. */
static bool is_frozen(const struct freezer *f)
{
	char buf[256];
	long fd, n;
	struct text events;

	if (f->v1)
		return file_begins(f->dir, "freezer.state", "FROZEN");
	fd = sys_openat(f->dir, "cgroup.events", O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (failed(fd))
		return false;
	n = sys_read((int)fd, buf, sizeof(buf));
	sys_close((int)fd);
	events = (struct text){.at = buf, .len = failed(n) ? 0 : (size_t)n};
	return text_after(&events, "frozen 1");
}

static void release(struct freezer *f)
{
	if (f->dir >= 0)
		sys_close(f->dir);
	*f = (struct freezer){.dir = -1};
}

/* thaw thaws the cgroup and schedules the first repetition. */
static void thaw(struct freezer *f)
{
	REACH("monitor.thaw");
	set_state(f, false);
	REACH("monitor.thawed");
	f->client = 0;
	f->frozen = false;
	f->repeats = 0;
	f->until = now(CLOCK_MONOTONIC) + repeats_after[0];
}

/* open_group opens the cgroup's directory and finds out which freezer it has. */
static const char *open_group(struct freezer *f, const char *path, size_t n)
{
	static char name[4096];
	long dir;

	if (n == 0 || n >= sizeof(name) || path[0] != '/')
		return "bad freeze request";
	memcpy(name, path, n);
	name[n] = 0;
	dir = sys_openat(AT_FDCWD, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW, 0);
	if (failed(dir))
		return "the cgroup cannot be opened";
	f->dir = (int)dir;
	f->v1 = failed(sys_faccessat(f->dir, "cgroup.freeze", 0));
	if (f->v1 && failed(sys_faccessat(f->dir, "freezer.state", 0))) {
		release(f);
		return "the cgroup has no freezer";
	}
	return NULL;
}

const char *freeze_begin(struct monitor *m, struct client *c, const char *payload, size_t n)
{
	struct freezer *f = &m->freezer;
	uint32_t limit = 0;
	const char *why;

	if (f->client != 0)
		return "the container is already frozen";
	if (n < LIMIT_SIZE)
		return "bad freeze request";
	for (int i = 0; i < LIMIT_SIZE; i++)
		limit = limit << 8 | (unsigned char)payload[i];
	if (limit == 0 || limit > LONGEST_LIMIT)
		limit = LONGEST_LIMIT;
	release(f);
	why = open_group(f, payload + LIMIT_SIZE, n - LIMIT_SIZE);
	if (why != NULL)
		return why;
	f->client = c->serial;
	f->until = now(CLOCK_MONOTONIC) + limit * MILLISECOND;
	REACH("monitor.freeze");
	set_state(f, true);
	REACH("monitor.frozen");
	freeze_continue(m);
	return NULL;
}

const char *freeze_end(struct monitor *m, const struct client *c)
{
	if (m->freezer.client == 0 || m->freezer.client != c->serial)
		return "the container is not frozen by this client";
	thaw(&m->freezer);
	return NULL;
}

/* freezing_client returns the client that waits for the frozen cgroup, NULL if it has left. */
static struct client *freezing_client(struct monitor *m)
{
	for (int i = 0; i < m->client_count; i++)
		if (m->clients[i].serial == m->freezer.client && !m->clients[i].dead)
			return &m->clients[i];
	return NULL;
}

/* repeat_thaw thaws the cgroup again, and forgets it after the last repetition. */
static void repeat_thaw(struct freezer *f)
{
	set_state(f, false);
	f->repeats++;
	if (f->repeats == THAW_REPEATS)
		release(f);
	else
		f->until = now(CLOCK_MONOTONIC) + repeats_after[f->repeats];
}

void freeze_continue(struct monitor *m)
{
	struct freezer *f = &m->freezer;
	struct client *c;
	bool over;

	if (f->dir < 0)
		return;
	over = now(CLOCK_MONOTONIC) >= f->until;
	if (f->client == 0) {
		if (over)
			repeat_thaw(f);
		return;
	}
	c = freezing_client(m);
	if (over || c == NULL) {
		bool waits = !f->frozen;

		thaw(f);
		if (c != NULL && waits)
			client_answer(m, c, "the container does not freeze: a process is in uninterruptible sleep");
		return;
	}
	if (f->frozen)
		return;
	if (!is_frozen(f)) {
		if (f->v1) /* a process that forked meanwhile may have escaped the first write */
			set_state(f, true);
		return;
	}
	f->frozen = true;
	client_answer(m, c, NULL);
}

int freeze_pause(const struct monitor *m)
{
	const struct freezer *f = &m->freezer;
	int64_t rest;

	if (f->dir < 0)
		return -1;
	if (f->client != 0 && !f->frozen)
		return FREEZE_POLL;
	rest = (f->until - now(CLOCK_MONOTONIC) + MILLISECOND - 1) / MILLISECOND;
	if (rest < 0)
		return 0;
	return rest > LONGEST_WAIT ? LONGEST_WAIT : (int)rest;
}

void freeze_cancel(struct monitor *m)
{
	if (m->freezer.dir < 0)
		return;
	set_state(&m->freezer, false);
	release(&m->freezer);
}
