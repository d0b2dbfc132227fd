/* unusual KIND prints numbers in a form that a restore accepts or refuses. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

#define SIGNATURE 0x53053053

static int fail(const char *what)
{
	perror(what);
	return 1;
}

/* last_byte changes the last byte of the vDSO, which is padding. */
static int last_byte(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned long start, end;

	while (maps && fgets(line, sizeof line, maps))
		if (strstr(line, "[vdso]") && sscanf(line, "%lx-%lx", &start, &end) == 2) {
			if (mprotect((void *)start, end - start, PROT_READ | PROT_WRITE | PROT_EXEC))
				return fail("mprotect");
			((volatile char *)end)[-1] ^= 1;
			return fclose(maps);
		}
	return fail("find the vDSO");
}

/* area registers an area of restartable sequences in memory of the kind flags. */
static int area(int flags)
{
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		return fail("mmap");
	if (syscall(SYS_rseq, page, 32, 0, SIGNATURE))
		return fail("rseq");
	return 0;
}

/* guard makes two ranges of guard pages. */
static int guard(void)
{
	char *memory = mmap(NULL, 16 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		return fail("mmap");
	memset(memory, 1, 16 * 4096);
	if (madvise(memory + 4096, 4096, MADV_GUARD_INSTALL) || madvise(memory + 8 * 4096, 2 * 4096, MADV_GUARD_INSTALL))
		return fail("madvise");
	return 0;
}

int main(int argc, char **argv)
{
	const char *kind = argc > 1 ? argv[1] : "";
	int failed = !strcmp(kind, "vdso") ? last_byte()
		: !strcmp(kind, "shared") ? area(MAP_SHARED)
		: !strcmp(kind, "private") ? area(MAP_PRIVATE)
		: !strcmp(kind, "guard") ? guard() : 0;

	if (failed)
		return 1;
	for (int i = 1;; i++) {
		printf("%d\n", i);
		fflush(stdout);
		usleep(20000);
	}
}
