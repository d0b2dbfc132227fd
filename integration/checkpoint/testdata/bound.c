/*
 * bound PATH... listens on a unix socket at each path, prints "ready" and waits.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		struct sockaddr_un at = {.sun_family = AF_UNIX};
		int fd = socket(AF_UNIX, SOCK_STREAM, 0);

		strncpy(at.sun_path, argv[i], sizeof(at.sun_path) - 1);
		if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at)) != 0 || listen(fd, 1) != 0) {
			perror(argv[i]);
			exit(1);
		}
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
