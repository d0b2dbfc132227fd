#define _GNU_SOURCE
/*
 * withoutcpu runs an OCI runtime on a machine whose cgroup v2 lacks the cpu controller. containerd
 * and CRI-O give every sandbox a CPU weight, which runc and crun then cannot set. It empties the
 * object "cpu" of the bundle's config.json, and executes the program beside it whose name has the
 * suffix ".oci". It allocates nothing and reads one file, to add as little time as possible.
 */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int empty_cpu(const char *bundle)
{
	static const char key[] = "\"cpu\":{";
	char path[PATH_MAX], *text, *cpu, *end;
	struct stat st;
	int fd;

	snprintf(path, sizeof(path), "%s/config.json", bundle);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		return -1;
	text = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (text == MAP_FAILED)
		return -1;
	cpu = memmem(text, st.st_size, key, sizeof(key) - 1);
	if (cpu) {
		cpu += sizeof(key) - 1;
		end = memchr(cpu, '}', text + st.st_size - cpu);
		if (end)
			memset(cpu, ' ', end - cpu);
	}
	return 0;
}

int main(int argc, char **argv)
{
	char program[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - sizeof(".oci"));
	int i;

	if (n < 0) {
		perror("withoutcpu: /proc/self/exe");
		return 1;
	}
	strcpy(program + n, ".oci");
	for (i = 1; i + 1 < argc; i++) {
		if ((!strcmp(argv[i], "--bundle") || !strcmp(argv[i], "-b")) && empty_cpu(argv[i + 1]) < 0) {
			perror("withoutcpu: config.json");
			return 1;
		}
	}
	execv(program, argv);
	perror(program);
	return 1;
}
