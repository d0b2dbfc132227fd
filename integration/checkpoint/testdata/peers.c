/*
 * peers are the processes of containers with connections that a checkpoint has to refuse or to keep.
 *
 *	peers serve PATH      accepts connections on a unix socket and answers each number with the next
 *	peers connect PATH    connects, and exchanges numbers until the connection ends
 *	peers io_uring        holds an io_uring
 *
 * Each prints "ready" when the state is reached.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
