/*
 * workload is the process of a container that is saved and restored. It has what a server has:
 * threads, an epoll set with a timer and a listening socket, a connected pair of sockets, a deleted
 * file that is still open, and shared memory. Ten times a second it prints one line:
 *
 *	tick=N threads=T file=F pair=P shared=S
 *
 * T is the sum of what its threads have counted, F the number of bytes in the deleted file, P the
 * number of bytes that went through the pair, S the number in shared memory. All but T equal N. A
 * client of port 7000 gets the number N.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { THREADS = 3 };

static atomic_long counted;

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

static void *count(void *unused)
{
	(void)unused;
	while (usleep(10000) == 0 || errno == EINTR) /* a restore interrupts sleeps */
		atomic_fetch_add(&counted, 1);
	return NULL;
}

static int listener(void)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7000)};
	int yes = 1, fd = socket(AF_INET, SOCK_STREAM, 0);

	check(fd >= 0, "socket");
	check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) == 0, "setsockopt");
	check(bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0, "bind");
	check(listen(fd, 8) == 0, "listen");
	return fd;
}

static void watch(int epoll, int fd)
{
	struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};

	check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &e) == 0, "epoll_ctl");
}

int main(void)
{
	struct itimerspec every = {.it_interval.tv_nsec = 100000000, .it_value.tv_nsec = 100000000};
	int epoll = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, 0), port = listener(), pair[2];
	int deleted = open("/deleted", O_RDWR | O_CREAT, 0600);
	long *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), piped = 0;

	check(epoll >= 0 && timer >= 0 && deleted >= 0 && shared != MAP_FAILED, "set up");
	check(unlink("/deleted") == 0, "unlink");
	check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
	check(timerfd_settime(timer, 0, &every, NULL) == 0, "timerfd_settime");
	watch(epoll, timer);
	watch(epoll, port);
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 0; i < THREADS; i++) {
		pthread_t t;

		check(pthread_create(&t, NULL, count, NULL) == 0, "pthread_create");
	}
	for (long n = 0;;) {
		struct epoll_event e;
		char byte = 'x';

		if (epoll_wait(epoll, &e, 1, -1) != 1)
			continue;
		if (e.data.fd == timer) {
			unsigned long fired;
			struct stat st;

			if (read(timer, &fired, sizeof(fired)) != sizeof(fired))
				continue;
			n++;
			(*shared)++;
			check(write(deleted, &byte, 1) == 1, "write");
			check(write(pair[0], &byte, 1) == 1, "write to pair");
			check(read(pair[1], &byte, 1) == 1, "read from pair");
			piped++;
			check(fstat(deleted, &st) == 0, "fstat");
			printf("tick=%ld threads=%ld file=%ld pair=%ld shared=%ld\n", n, atomic_load(&counted), (long)st.st_size,
				piped, *shared);
		} else {
			int client = accept(port, NULL, NULL);

			if (client >= 0) {
				dprintf(client, "%ld\n", n);
				close(client);
			}
		}
	}
}
