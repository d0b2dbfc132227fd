//go:build cgo && seccomp

#define _GNU_SOURCE
#include "capture.h"

#include <errno.h>
#include <seccomp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct {
	atomic_bool on;
	unsigned char *program;
	size_t size;
} state;

void capture_start(void)
{
	capture_stop();
	state.on = true;
}

void capture_stop(void)
{
	free(state.program);
	memset(&state, 0, sizeof(state));
}

const void *capture_program(size_t *size)
{
	*size = state.size;
	return state.program;
}

int __real_seccomp_export_bpf(const scmp_filter_ctx ctx, int fd);

// take_program keeps the program that libseccomp exports.
static void take_program(scmp_filter_ctx ctx)
{
	struct stat st;
	int fd = memfd_create("filter", MFD_CLOEXEC);

	if (fd < 0)
		return;
	if (__real_seccomp_export_bpf(ctx, fd) == 0 && fstat(fd, &st) == 0 && st.st_size > 0) {
		free(state.program);
		state.size = 0;
		state.program = malloc((size_t)st.st_size);
		if (state.program && pread(fd, state.program, (size_t)st.st_size, 0) == st.st_size)
			state.size = (size_t)st.st_size;
	}
	close(fd);
}

int __wrap_seccomp_export_bpf(const scmp_filter_ctx ctx, int fd)
{
	if (!state.on)
		return __real_seccomp_export_bpf(ctx, fd);
	take_program(ctx);
	return -ECANCELED;
}

int __real_seccomp_load(const scmp_filter_ctx ctx);

int __wrap_seccomp_load(const scmp_filter_ctx ctx) { return state.on ? -ECANCELED : __real_seccomp_load(ctx); }

// libseccomp 2.6 added this function. A program built with it may run with an older library.
#if SCMP_VER_MAJOR > 2 || SCMP_VER_MINOR >= 6
__attribute__((weak)) int __real_seccomp_export_bpf_mem(const scmp_filter_ctx ctx, void *buf, size_t *len);

int __wrap_seccomp_export_bpf_mem(const scmp_filter_ctx ctx, void *buf, size_t *len)
{
	if (state.on)
		return -ECANCELED;
	return __real_seccomp_export_bpf_mem ? __real_seccomp_export_bpf_mem(ctx, buf, len) : -EOPNOTSUPP;
}
#endif
