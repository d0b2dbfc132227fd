//go:build cgo && seccomp

#define _GNU_SOURCE
#include "memo.h"

#include <errno.h>
#include <seccomp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(struct scmp_arg_cmp) == 24, "an argument's comparison has no padding");
_Static_assert(sizeof(struct memo_call) == 24, "a call has no padding");

enum mode { OFF, RECORD, COMPARE };

static struct {
	_Atomic enum mode mode;
	scmp_filter_ctx filter; // that is made; NULL: not yet
	// RECORD: what there is so far, in memory of its own. COMPARE: the recording.
	unsigned char *calls;
	size_t size, room;
	unsigned char *program;
	size_t program_size;
	int spoilt;    // RECORD: there was what cannot be recorded
	size_t agreed; // COMPARE: as many bytes of calls have been made
	int ruled;     // a rule was recorded, or kept from libseccomp
} memo;

void memo_forget(void)
{
	if (memo.mode == RECORD) {
		free(memo.calls);
		free(memo.program);
	}
	memset(&memo, 0, sizeof(memo));
}

int memo_record(void)
{
	memo_forget();
	memo.mode = RECORD;
	if (seccomp_export_bpf(NULL, -1) == -ECANCELED)
		return 0;
	memo_forget();
	return -1;
}

struct memo memo_recording(void)
{
	struct memo m = {memo.calls, memo.size, memo.program, memo.program_size};

	if (memo.spoilt)
		m.program = NULL;
	return m;
}

void memo_compare(struct memo recording)
{
	memo_forget();
	memo.calls = (unsigned char *)recording.calls;
	memo.size = recording.calls_size;
	memo.program = (unsigned char *)recording.program;
	memo.program_size = recording.program_size;
	memo.mode = COMPARE;
}

static int records(scmp_filter_ctx ctx) { return memo.mode == RECORD && ctx == memo.filter; }
static int compares(scmp_filter_ctx ctx) { return memo.mode == COMPARE && ctx == memo.filter; }

static void append(const void *bytes, size_t n)
{
	if (memo.program) // it was made without these
		memo.spoilt = 1;
	if (memo.size + n > memo.room) {
		size_t room = 2 * (memo.size + n);
		unsigned char *more = realloc(memo.calls, room);
		if (!more) {
			memo.spoilt = 1;
			return;
		}
		memo.calls = more;
		memo.room = room;
	}
	memcpy(memo.calls + memo.size, bytes, n);
	memo.size += n;
}

// matches tells whether the bytes come next in the recording, and goes on behind them.
static int matches(const void *bytes, size_t n)
{
	if (n > memo.size - memo.agreed || memcmp(memo.calls + memo.agreed, bytes, n) != 0)
		return 0;
	memo.agreed += n;
	return 1;
}

// note records or compares a call that was made. One that disagrees ends the comparison: no rule was kept back, or settled had given
// it up.
static void note(scmp_filter_ctx ctx, struct memo_call call)
{
	if (records(ctx))
		append(&call, sizeof(call));
	else if (compares(ctx) && !matches(&call, sizeof(call)))
		memo_forget();
}

int __real_seccomp_rule_add_array(scmp_filter_ctx ctx, uint32_t action, int syscall, unsigned int n, const struct scmp_arg_cmp *args);

// give_up ends the comparison: libseccomp gets the rules that were kept from it.
static int give_up(scmp_filter_ctx ctx)
{
	const unsigned char *at = memo.calls, *end = memo.calls + memo.agreed;
	int failed = 0;

	if (records(ctx))
		memo.spoilt = 1;
	if (!compares(ctx))
		return 0;
	memo_forget();
	while (at < end && !failed) {
		struct memo_call call;
		struct scmp_arg_cmp args[MEMO_MAX_ARGS];

		memcpy(&call, at, sizeof(call));
		at += sizeof(call);
		memcpy(args, at, call.args * sizeof(*args));
		at += call.args * sizeof(*args);
		if (call.kind == MEMO_RULE)
			failed = __real_seccomp_rule_add_array(ctx, call.what, (int)call.value, call.args, args);
	}
	return failed;
}

// settled is called before a setting is changed: in a recording that is before the first rule.
static int settled(scmp_filter_ctx ctx) { return memo.ruled ? give_up(ctx) : 0; }

scmp_filter_ctx __real_seccomp_init(uint32_t action);

scmp_filter_ctx __wrap_seccomp_init(uint32_t action)
{
	scmp_filter_ctx ctx;

	if (memo.mode == OFF)
		return __real_seccomp_init(action);
	if (memo.filter && give_up(memo.filter) != 0)
		return NULL;
	ctx = __real_seccomp_init(action);
	if (ctx && memo.mode != OFF && !memo.filter) {
		memo.filter = ctx;
		note(ctx, (struct memo_call){.kind = MEMO_INIT, .what = action});
	}
	return ctx;
}

int __real_seccomp_arch_add(scmp_filter_ctx ctx, uint32_t arch);

int __wrap_seccomp_arch_add(scmp_filter_ctx ctx, uint32_t arch)
{
	int rc = settled(ctx);

	if (rc == 0) {
		rc = __real_seccomp_arch_add(ctx, arch);
		note(ctx, (struct memo_call){.kind = MEMO_ARCH, .what = arch, .result = rc});
	}
	return rc;
}

int __real_seccomp_attr_set(scmp_filter_ctx ctx, enum scmp_filter_attr attr, uint32_t value);

int __wrap_seccomp_attr_set(scmp_filter_ctx ctx, enum scmp_filter_attr attr, uint32_t value)
{
	int rc = settled(ctx);

	if (rc == 0) {
		rc = __real_seccomp_attr_set(ctx, attr, value);
		note(ctx, (struct memo_call){.kind = MEMO_ATTR, .what = attr, .value = value, .result = rc});
	}
	return rc;
}

int __wrap_seccomp_rule_add_array(scmp_filter_ctx ctx, uint32_t action, int syscall, unsigned int n, const struct scmp_arg_cmp *args)
{
	struct {
		struct memo_call call;
		struct scmp_arg_cmp args[MEMO_MAX_ARGS];
	} rule = {.call = {.kind = MEMO_RULE, .what = action, .value = (uint32_t)syscall, .args = n}};
	size_t size = sizeof(rule.call) + n * sizeof(*args);
	int rc;

	if (n > MEMO_MAX_ARGS) {
		rc = give_up(ctx);
		return rc ? rc : __real_seccomp_rule_add_array(ctx, action, syscall, n, args);
	}
	if (n > 0)
		memcpy(rule.args, args, n * sizeof(*args));
	if (compares(ctx)) {
		if (matches(&rule, size)) {
			memo.ruled = 1;
			return 0;
		}
		rc = give_up(ctx);
		if (rc != 0)
			return rc;
	}
	rc = __real_seccomp_rule_add_array(ctx, action, syscall, n, args);
	if (records(ctx) && rc == 0) {
		memo.ruled = 1;
		append(&rule, size);
	} else if (records(ctx)) {
		memo.spoilt = 1;
	}
	return rc;
}

int __real_seccomp_export_bpf(const scmp_filter_ctx ctx, int fd);

// take_program exports the program into the recording.
static void take_program(scmp_filter_ctx ctx)
{
	struct stat st;
	int fd = memfd_create("filter", MFD_CLOEXEC);

	if (fd < 0)
		return;
	if (__real_seccomp_export_bpf(ctx, fd) == 0 && fstat(fd, &st) == 0 && st.st_size > 0) {
		memo.program = malloc((size_t)st.st_size);
		if (memo.program && pread(fd, memo.program, (size_t)st.st_size, 0) == st.st_size)
			memo.program_size = (size_t)st.st_size;
	}
	close(fd);
}

static int write_all(int fd, const unsigned char *bytes, size_t n)
{
	while (n > 0) {
		ssize_t done = write(fd, bytes, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return -errno;
		bytes += done;
		n -= (size_t)done;
	}
	return 0;
}

int __wrap_seccomp_export_bpf(const scmp_filter_ctx ctx, int fd)
{
	int rc;

	if (records(ctx)) {
		if (ctx && !memo.spoilt && !memo.program)
			take_program(ctx);
		return -ECANCELED;
	}
	if (compares(ctx) && memo.agreed == memo.size)
		return write_all(fd, memo.program, memo.program_size);
	rc = give_up(ctx);
	return rc ? rc : __real_seccomp_export_bpf(ctx, fd);
}

int __real_seccomp_load(const scmp_filter_ctx ctx);

int __wrap_seccomp_load(const scmp_filter_ctx ctx)
{
	int rc = records(ctx) ? -ECANCELED : give_up(ctx);

	return rc ? rc : __real_seccomp_load(ctx);
}

void __real_seccomp_release(scmp_filter_ctx ctx);

// A filter that is being recorded is not released before memo_recording; other threads release earlier ones.
void __wrap_seccomp_release(scmp_filter_ctx ctx)
{
	if (compares(ctx))
		memo_forget();
	__real_seccomp_release(ctx);
}

int __real_seccomp_merge(scmp_filter_ctx ctx, scmp_filter_ctx src);

int __wrap_seccomp_merge(scmp_filter_ctx ctx, scmp_filter_ctx src)
{
	int rc = give_up(ctx);

	if (rc == 0)
		rc = give_up(src);
	return rc ? rc : __real_seccomp_merge(ctx, src);
}

// PLAIN wraps a function that is neither recorded nor compared.
#define PLAIN(name, params, args)                                                                                      \
	int __real_##name params;                                                                                      \
	int __wrap_##name params                                                                                       \
	{                                                                                                              \
		int rc = give_up(ctx);                                                                                 \
                                                                                                                       \
		return rc ? rc : __real_##name args;                                                                   \
	}

PLAIN(seccomp_reset, (scmp_filter_ctx ctx, uint32_t action), (ctx, action))
PLAIN(seccomp_arch_remove, (scmp_filter_ctx ctx, uint32_t arch), (ctx, arch))
PLAIN(seccomp_syscall_priority, (scmp_filter_ctx ctx, int syscall, uint8_t priority), (ctx, syscall, priority))
PLAIN(seccomp_rule_add_exact_array,
      (scmp_filter_ctx ctx, uint32_t action, int syscall, unsigned int n, const struct scmp_arg_cmp *args),
      (ctx, action, syscall, n, args))
PLAIN(seccomp_export_pfc, (const scmp_filter_ctx ctx, int fd), (ctx, fd))

// What libseccomp 2.6 has more. A program that was built with it may meet an older one.
#if SCMP_VER_MAJOR > 2 || SCMP_VER_MINOR >= 6
#define NEWER(name, params, args)                                                                                      \
	__attribute__((weak)) int __real_##name params;                                                                \
	int __wrap_##name params                                                                                       \
	{                                                                                                              \
		int rc = __real_##name ? give_up(ctx) : -EOPNOTSUPP;                                                   \
                                                                                                                       \
		return rc ? rc : __real_##name args;                                                                   \
	}

NEWER(seccomp_precompute, (const scmp_filter_ctx ctx), (ctx))
NEWER(seccomp_export_bpf_mem, (const scmp_filter_ctx ctx, void *buf, size_t *len), (ctx, buf, len))
NEWER(seccomp_transaction_start, (const scmp_filter_ctx ctx), (ctx))
NEWER(seccomp_transaction_commit, (const scmp_filter_ctx ctx), (ctx))

__attribute__((weak)) void __real_seccomp_transaction_reject(const scmp_filter_ctx ctx);

// A transaction that is rejected was begun, which has ended the comparison.
void __wrap_seccomp_transaction_reject(const scmp_filter_ctx ctx)
{
	if (__real_seccomp_transaction_reject)
		__real_seccomp_transaction_reject(ctx);
}
#endif
