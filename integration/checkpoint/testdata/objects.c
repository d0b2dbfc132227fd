/*
 * objects uses one kernel object of each kind twenty times a second, and checks that each does what it
 * did before. A second process takes part. It prints one line for each round:
 *
 *	round=N inotify=N memfd=N shm=N eventfd=N signalfd=N udp=N unix=N dup=2N timer=T
 *
 * T grows. All other numbers depend on N as shown. It exits with 1 after a failed call.
 *
 *	objects DIR     watches DIR with inotify and makes files there
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t fired;

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

static void count(int signal)
{
	(void)signal;
	fired++;
}

/* readAll reads size bytes. A restore or the timer may interrupt a call. */
static void readAll(int fd, void *to, size_t size, const char *what)
{
	ssize_t n;

	do
		n = read(fd, to, size);
	while (n < 0 && errno == EINTR);
	check(n == (ssize_t)size, what);
}

static void writeAll(int fd, const void *from, size_t size, const char *what)
{
	check(write(fd, from, size) == (ssize_t)size, what);
}

static long *mapped(int fd)
{
	long *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	check(at != MAP_FAILED, "mmap");
	return at;
}

/*
 * partner answers each question with the numbers in the memory that it shares with its parent, and with
 * whether the parent still holds its lock.
 */
static void partner(int questions, int answers, const long *memfd, const long *shm)
{
	char question;

	for (;;) {
		long answer[3];
		int lock = open("/lock", O_RDWR);

		readAll(questions, &question, 1, "question");
		answer[0] = *memfd;
		answer[1] = *shm;
		answer[2] = flock(lock, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
		close(lock);
		writeAll(answers, answer, sizeof(answer), "answer");
	}
}

static void startTimer(void)
{
	struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN};
	struct itimerspec every = {.it_interval.tv_nsec = 10000000, .it_value.tv_nsec = 10000000};
	struct sigaction handler = {.sa_handler = count, .sa_flags = SA_RESTART};
	timer_t timer;

	check(sigaction(SIGRTMIN, &handler, NULL) == 0, "sigaction");
	check(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0, "timer_create");
	check(timer_settime(timer, 0, &every, NULL) == 0, "timer_settime");
}

/* toItself returns a bound datagram socket and its address. */
static int toItself(int family, struct sockaddr_storage *at, socklen_t *size)
{
	struct sockaddr_in *in = (struct sockaddr_in *)at;
	struct sockaddr_un *un = (struct sockaddr_un *)at;
	int fd = socket(family, SOCK_DGRAM, 0);

	memset(at, 0, sizeof(*at));
	at->ss_family = family;
	if (family == AF_INET) {
		in->sin_port = htons(7001);
		in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		*size = sizeof(*in);
	} else {
		strcpy(un->sun_path + 1, "objects"); /* abstract */
		*size = offsetof(struct sockaddr_un, sun_path) + 1 + strlen("objects");
	}
	check(fd >= 0 && bind(fd, (struct sockaddr *)at, *size) == 0, "datagram socket");
	return fd;
}

static long echo(int fd, const struct sockaddr_storage *to, socklen_t size, long number)
{
	check(sendto(fd, &number, sizeof(number), 0, (const struct sockaddr *)to, size) == sizeof(number), "sendto");
	readAll(fd, &number, sizeof(number), "datagram");
	return number;
}

int main(int argc, char **argv)
{
	int questions[2], answers[2], inotify, event, signals, udp, local, file, copy, lock, memfd, shm;
	long *inMemfd, *inShm, watched = 0, events = 0, signalled = 0;
	struct sockaddr_storage udpAt, localAt;
	socklen_t udpSize, localSize;
	sigset_t usr1;
	char path[256];

	check(argc == 2, "argument");
	umask(027);
	check((mkdir(argv[1], 0755) == 0 || errno == EEXIST) && chdir(argv[1]) == 0, "chdir");
	memfd = memfd_create("objects", 0);
	shm = open("/dev/shm/objects", O_RDWR | O_CREAT, 0600);
	check(ftruncate(memfd, 4096) == 0 && ftruncate(shm, 4096) == 0, "memory");
	inMemfd = mapped(memfd);
	inShm = mapped(shm);
	lock = open("/lock", O_RDWR | O_CREAT, 0600);
	check(lock >= 0 && flock(lock, LOCK_EX) == 0, "flock");
	check(pipe(questions) == 0 && pipe(answers) == 0, "pipe");
	if (fork() == 0)
		partner(questions[0], answers[1], mapped(memfd), inShm);
	inotify = inotify_init1(0);
	check(inotify_add_watch(inotify, argv[1], IN_CLOSE_WRITE) >= 0, "inotify_add_watch");
	event = eventfd(0, 0);
	sigemptyset(&usr1);
	sigaddset(&usr1, SIGUSR1);
	check(sigprocmask(SIG_BLOCK, &usr1, NULL) == 0, "sigprocmask");
	signals = signalfd(-1, &usr1, 0);
	udp = toItself(AF_INET, &udpAt, &udpSize);
	local = toItself(AF_UNIX, &localAt, &localSize);
	file = open("/log", O_RDWR | O_CREAT | O_TRUNC, 0600);
	copy = dup(file);
	check(event >= 0 && signals >= 0 && copy >= 0, "set up");
	startTimer();
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (long n = 1;; n++) {
		struct timespec pause = {.tv_nsec = 50000000};
		char buf[sizeof(struct inotify_event) + 256], name[64];
		struct signalfd_siginfo got;
		unsigned long one = 1;
		long answer[3];
		struct stat st;

		while (nanosleep(&pause, &pause) != 0)
			check(errno == EINTR, "nanosleep");
		snprintf(name, sizeof(name), "file-%ld", n % 10);
		close(open(name, O_WRONLY | O_CREAT, 0666)); /* in the working directory */
		check(read(inotify, buf, sizeof(buf)) > 0 && strcmp(((struct inotify_event *)buf)->name, name) == 0, "inotify");
		watched++;
		check(stat(name, &st) == 0 && (st.st_mode & 0777) == 0640, "umask");
		*inMemfd = *inShm = n;
		writeAll(questions[1], "?", 1, "question");
		readAll(answers[0], answer, sizeof(answer), "answer");
		check(answer[2], "the lock is not held");
		writeAll(event, &one, sizeof(one), "eventfd");
		readAll(event, &one, sizeof(one), "eventfd");
		events += one;
		check(kill(getpid(), SIGUSR1) == 0, "kill");
		readAll(signals, &got, sizeof(got), "signalfd");
		signalled += got.ssi_signo == SIGUSR1;
		writeAll(file, "a", 1, "file");
		writeAll(copy, "b", 1, "copy");
		check(getcwd(path, sizeof(path)) && strcmp(path, argv[1]) == 0, "working directory");
		printf("round=%ld inotify=%ld memfd=%ld shm=%ld eventfd=%ld signalfd=%ld udp=%ld unix=%ld dup=%ld timer=%ld\n", n, watched,
			answer[0], answer[1], events, signalled, echo(udp, &udpAt, udpSize, n), echo(local, &localAt, localSize, n),
			(long)lseek(file, 0, SEEK_CUR), (long)fired);
	}
}
