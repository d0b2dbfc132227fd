/*
 * openLogFile in shim/launcher does the same for the launcher. Below dir no symbolic link is followed, and the file must be a
 * regular one: a container that has the log directory mounted could have put anything there.
 */
#include "monitor.h"

/* below returns the part of path that comes after the directory dir, NULL if it is not below it. Both are clean. */
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

	/* EAGAIN means that a rename raced with the walk. Somebody who renames all the
	 * time must not keep a monitor from its container. */
	for (int attempt = 0;; attempt++) {
		long fd = sys_openat2(root, path, &how);

		if ((fd != -EINTR && fd != -EAGAIN) || attempt == 100)
			return fd;
	}
}

/* open_regular returns a descriptor, or -errno; *what is why if there is no errno for it. */
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
