/*
 * Opens log files like the launcher's openLogFile. Below dir it accepts only regular files and no
 * symbolic links, because a container that mounts the log directory can create any file there.
 */
#include "monitor.h"

/* below returns path relative to dir, NULL if it is not below dir. Both are clean. */
static const char *below(const char *dir, const char *path)
{
	size_t n = strlen(dir);

	if (n > 0 && dir[n - 1] == '/')
		n--; /* the root */
	if (strlen(path) <= n + 1 || memcmp(path, dir, n) != 0 || path[n] != '/')
		return NULL;
	return path + n + 1;
}

static long open_beneath(int root, const char *path)
{
	struct open_how how = {
		.flags = O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
		.mode = 0640,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS,
	};

	/* EAGAIN means that a rename raced with the path walk. A process that renames all the
	 * time must not keep the monitor from its container. */
	for (int attempt = 0;; attempt++) {
		long fd = sys_openat2(root, path, &how);

		if ((fd != -EINTR && fd != -EAGAIN) || attempt == 100)
			return fd;
	}
}

/* open_regular returns a descriptor, or -errno. *what is the reason if no errno fits. */
static long open_regular(const char *dir, const char *path, const char **what)
{
	const char *name = below(dir, path);
	struct statx st;
	long root, fd, result;

	*what = NULL;
	if (name == NULL) {
		*what = "it is not below its directory";
		return -EINVAL;
	}
	root = sys_openat(AT_FDCWD, dir, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
	if (failed(root))
		return root;
	fd = open_beneath((int)root, name);
	sys_close((int)root);
	if (failed(fd))
		return fd;
	result = sys_statx((int)fd, "", AT_EMPTY_PATH, STATX_TYPE, &st);
	if (!failed(result) && (st.stx_mode & S_IFMT) != S_IFREG) {
		*what = "not a regular file";
		result = -EINVAL;
	}
	if (!failed(result))
		return fd;
	sys_close((int)fd);
	return result;
}

int logfile_open(const char *dir, const char *path, struct line *why)
{
	const char *what;
	long fd = open_regular(dir, path, &what);

	if (!failed(fd))
		return (int)fd;
	line_text(why, "open log ");
	line_text(why, path);
	line_text(why, ": ");
	if (what != NULL)
		line_text(why, what);
	else
		line_error(why, (int)-fd);
	return -1;
}
