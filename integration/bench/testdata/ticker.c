/*
 * ticker MIB fills MIB mebibytes of memory and then looks at the clock once a millisecond. When more
 * than 4 ms have passed between two looks, it appends a line to /ticks/gaps: the time now and the
 * length of the gap, both in microseconds. ticker.sh does the same.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { LONG_GAP = 4000, TICK = 1000000 };

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* fill writes numbers without a pattern, so that no page equals another. */
static void fill(uint64_t *memory, size_t words)
{
	uint64_t x = 88172645463325252ULL;

	for (size_t i = 0; i < words; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memory[i] = x;
	}
}

static void report(int64_t at, int64_t gap)
{
	char line[64];
	int n = snprintf(line, sizeof(line), "%lld %lld\n", (long long)at, (long long)gap);
	int fd = open("/ticks/gaps", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);

	if (fd < 0 || write(fd, line, n) != n || close(fd) != 0)
		exit(1);
}

int main(int argc, char **argv)
{
	size_t size = (size_t)(argc > 1 ? atol(argv[1]) : 0) << 20;
	void *memory = malloc(size);
	const struct timespec tick = {.tv_nsec = TICK};

	if (memory == NULL)
		return 1;
	fill(memory, size / sizeof(uint64_t));
	report(now(), 0);
	for (int64_t last = now();;) {
		int64_t at;

		nanosleep(&tick, NULL);
		at = now();
		if (at - last > LONG_GAP)
			report(at, at - last);
		last = at;
	}
}
