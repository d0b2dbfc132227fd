/*
 * peers are the processes of containers with connections that a checkpoint has to refuse or to
 * keep.
 *
 *	peers serve PATH      accepts connections on a unix socket and answers each number with the next
 *	peers connect PATH    connects, and exchanges numbers until the connection ends
 *	peers answer OWN PEER waits at the unix datagram socket OWN and answers each number to PEER with the next
 *	peers ask OWN PEER    the same, after it has sent 1
 *	peers memory PATH N   increments the number in a shared file whenever its remainder modulo 2 is N
 *	peers io_uring        holds an io_uring
 *
 * Each prints "ready" when the state is reached. "answer", "ask" and "memory" print each number that they
 * have got.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

static void talk(int fd, long number)
{
	ready();
	while (write(fd, &number, sizeof(number)) == sizeof(number) && read(fd, &number, sizeof(number)) == sizeof(number)) {
		number++;
		usleep(10000);
	}
	exit(3);
}

/* datagrams exchanges numbers with a peer. The number is in one of the two sockets or processes. */
static void datagrams(const char *own, const char *peer, int first)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX}, to = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
	long number = 0;

	strncpy(at.sun_path, own, sizeof(at.sun_path) - 1);
	strncpy(to.sun_path, peer, sizeof(to.sun_path) - 1);
	check(fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0, "bind");
	ready();
	for (;; first = 0) {
		if (!first)
			check(read(fd, &number, sizeof(number)) == sizeof(number), "read");
		if (!first)
			printf("%ld\n", number);
		number++;
		usleep(10000);
		while (sendto(fd, &number, sizeof(number), 0, (struct sockaddr *)&to, sizeof(to)) != sizeof(number))
			usleep(10000); /* the peer is not there yet */
	}
}

/* memory takes turns with another process that has mapped the file, too. */
static void memory(const char *path, long turn)
{
	int fd = open(path, O_RDWR | O_CREAT, 0600);
	atomic_long *number;

	check(fd >= 0 && ftruncate(fd, sizeof(*number)) == 0, "open");
	number = mmap(NULL, sizeof(*number), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	check(number != MAP_FAILED, "mmap");
	ready();
	for (;; usleep(1000)) {
		long now = atomic_load(number);

		if (now % 2 != turn)
			continue;
		printf("%ld\n", now);
		usleep(10000);
		atomic_store(number, now + 1);
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	char params[120] = {0}; /* struct io_uring_params */
	long number = 0;
	int fd, peer;

	if (argc == 2 && strcmp(argv[1], "io_uring") == 0) {
		check(syscall(SYS_io_uring_setup, 4, params) >= 0, "io_uring_setup");
		ready();
		for (;;)
			pause();
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 4 && strcmp(argv[1], "memory") == 0)
		memory(argv[2], atol(argv[3]));
	if (argc == 4)
		datagrams(argv[2], argv[3], strcmp(argv[1], "ask") == 0);
	check(argc == 3, "arguments");
	strncpy(at.sun_path, argv[2], sizeof(at.sun_path) - 1);
	fd = socket(AF_UNIX, SOCK_STREAM, 0);
	check(fd >= 0, "socket");
	if (strcmp(argv[1], "serve") == 0) {
		check(bind(fd, (struct sockaddr *)&at, sizeof(at)) == 0, "bind");
		check(listen(fd, 8) == 0, "listen");
		puts("listening");
		fflush(stdout);
		peer = accept(fd, NULL, NULL);
		check(peer >= 0 && read(peer, &number, sizeof(number)) == sizeof(number), "first number");
		talk(peer, number + 1);
	}
	check(connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0, "connect");
	talk(fd, 1);
}
