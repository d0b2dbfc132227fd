/* The descriptors in epoll, for which the monitor waits. */
#include <asm/signal.h>

#include "monitor.h"

char frame[HEADER_SIZE + MAX_PAYLOAD];

long set_nonblock(int fd)
{
	long flags = sys_fcntl(fd, F_GETFL, 0);

	return failed(flags) ? flags : sys_fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

long watch(struct monitor *m, int fd, uint32_t events) { return watch_connection(m, fd, 0, events); }

long watch_connection(struct monitor *m, int fd, uint32_t serial, uint32_t events)
{
	struct epoll_event e = {.events = events, .data = event_data(fd, serial)};
	long result = sys_epoll_ctl(m->epoll, EPOLL_CTL_ADD, fd, &e);

	if (result == -EEXIST)
		result = sys_epoll_ctl(m->epoll, EPOLL_CTL_MOD, fd, &e);
	return result;
}

void forget(struct monitor *m, int fd)
{
	struct epoll_event unused = {0};

	sys_epoll_ctl(m->epoll, EPOLL_CTL_DEL, fd, &unused);
}

long watch_children(struct monitor *m)
{
	const unsigned long set = 1UL << (SIGCHLD - 1);
	long fd;

	if (m->children < 0) {
		fd = SYS4(signalfd4, -1, &set, sizeof(set), O_CLOEXEC | O_NONBLOCK);
		if (failed(fd))
			return fd;
		m->children = (int)fd;
	}
	return watch(m, m->children, EPOLLIN); /* also if an earlier attempt failed */
}
