#include "monitor.h"

/* kind is the type of a parameter. */
enum kind { TEXT, NUMBER, FLAG };

/* All parameters, in the order of the command line: see proto.MonitorParams. */
static const struct {
	const char *name;
	enum kind kind;
	size_t at;
} fields[] = {
	{"id", TEXT, offsetof(struct params, id)},
	{"dir", TEXT, offsetof(struct params, dir)},
	{"log-dir", TEXT, offsetof(struct params, log_dir)},
	{"log-path", TEXT, offsetof(struct params, log_path)},
	{"max-line", NUMBER, offsetof(struct params, max_line)},
	{"init", NUMBER, offsetof(struct params, init_pid)},
	{"stdin-once", FLAG, offsetof(struct params, stdin_once)},
	{"orphans", FLAG, offsetof(struct params, orphans)},
	{"kill-dir", TEXT, offsetof(struct params, kill_dir)},
	{"init-fd", NUMBER, offsetof(struct params, init)},
	{"listen-fd", NUMBER, offsetof(struct params, listen)},
	{"log-fd", NUMBER, offsetof(struct params, log)},
	{"stdin-fd", NUMBER, offsetof(struct params, stdin)},
	{"stdout-fd", NUMBER, offsetof(struct params, stdout)},
	{"stderr-fd", NUMBER, offsetof(struct params, stderr)},
	{"console-fd", NUMBER, offsetof(struct params, console)},
	{"verdict-fd", NUMBER, offsetof(struct params, verdict)},
	{"oom-fd", NUMBER, offsetof(struct params, oom)},
	{"oom-notify-fd", NUMBER, offsetof(struct params, oom_notify)},
	{"oom-parent-fd", NUMBER, offsetof(struct params, oom_parent)},
	{"gate-fd", NUMBER, offsetof(struct params, gate)},
};

enum { FIELDS = sizeof(fields) / sizeof(fields[0]) };

static bool set_flag(bool *to, struct text value)
{
	*to = text_equals(value, "true");
	return *to || text_equals(value, "false");
}

bool params_parse(struct params *p, int argc, char **argv)
{
	if (argc != FIELDS)
		return false;
	for (int i = 0; i < FIELDS; i++) {
		char *to = (char *)p + fields[i].at;
		struct text value = text_of(argv[i]), name;

		if (!text_cut(&value, '=', &name) || !text_equals(name, fields[i].name))
			return false;
		if (fields[i].kind == TEXT)
			*(const char **)to = value.at;
		else if (fields[i].kind == NUMBER && !text_int(value, (int *)to))
			return false;
		else if (fields[i].kind == FLAG && !set_flag((bool *)to, value))
			return false;
	}
	return true;
}

void params_fds(const struct params *p, void (*f)(int fd))
{
	const int fds[] = {p->init, p->listen, p->log, p->stdin, p->stdout, p->stderr, p->console, p->verdict, p->oom,
		p->oom_notify, p->oom_parent};

	for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
		if (fds[i] >= 0)
			f(fds[i]);
}
