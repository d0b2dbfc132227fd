//go:build cgo && seccomp

#define _GNU_SOURCE
#include "bpfcache.h"

#include <errno.h>
#include <seccomp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(struct scmp_arg_cmp) == 24, "an argument's comparison has no padding");
_Static_assert(sizeof(struct recorded_call) == 24, "a call has no padding");

enum mode { OFF, RECORD, COMPARE };

static struct {
	_Atomic enum mode mode;
	scmp_filter_ctx filter; // the recorded or compared filter; NULL: not created yet
	// RECORD: the calls so far, in allocated memory. COMPARE: the recording.
	unsigned char *calls;
	size_t size, capacity;
	unsigned char *program;
	size_t program_size;
	int invalid;    // RECORD: a call cannot be recorded
	size_t matched; // COMPARE: bytes of calls that have matched
	int has_rules;  // a rule was recorded, or withheld from libseccomp
} state;

void bpfcache_stop(void)
{
	if (state.mode == RECORD) {
		free(state.calls);
		free(state.program);
	}
	memset(&state, 0, sizeof(state));
}

int bpfcache_record(void)
{
	bpfcache_stop();
	state.mode = RECORD;
	if (seccomp_export_bpf(NULL, -1) == -ECANCELED)
		return 0;
	bpfcache_stop();
	return -1;
}

struct bpfcache_recording bpfcache_result(void)
{
	struct bpfcache_recording m = {state.calls, state.size, state.program, state.program_size};

	if (state.invalid)
		m.program = NULL;
	return m;
}

void bpfcache_compare(struct bpfcache_recording recording)
{
	bpfcache_stop();
	state.calls = (unsigned char *)recording.calls;
	state.size = recording.calls_size;
	state.program = (unsigned char *)recording.program;
	state.program_size = recording.program_size;
	state.mode = COMPARE;
}

static int is_recorded(scmp_filter_ctx ctx) { return state.mode == RECORD && ctx == state.filter; }
static int is_compared(scmp_filter_ctx ctx) { return state.mode == COMPARE && ctx == state.filter; }

static void append(const void *bytes, size_t n)
{
	if (state.program) // it was exported without this call
		state.invalid = 1;
	if (state.size + n > state.capacity) {
		size_t capacity = 2 * (state.size + n);
		unsigned char *more = realloc(state.calls, capacity);
		if (!more) {
			state.invalid = 1;
			return;
		}
		state.calls = more;
		state.capacity = capacity;
	}
	memcpy(state.calls + state.size, bytes, n);
	state.size += n;
}

// matches returns whether the bytes come next in the recording, and skips them if so.
static int matches(const void *bytes, size_t n)
{
	if (n > state.size - state.matched || memcmp(state.calls + state.matched, bytes, n) != 0)
		return 0;
	state.matched += n;
	return 1;
}

// on_call records or compares a call. A difference ends the comparison. No rules are withheld then:
// before_setting has passed them on.
static void on_call(scmp_filter_ctx ctx, struct recorded_call call)
{
	if (is_recorded(ctx))
		append(&call, sizeof(call));
	else if (is_compared(ctx) && !matches(&call, sizeof(call)))
		bpfcache_stop();
}

int __real_seccomp_rule_add_array(
	scmp_filter_ctx ctx, uint32_t action, int syscall, unsigned int n, const struct scmp_arg_cmp *args);

// fall_back ends the comparison and passes the withheld rules to libseccomp.
static int fall_back(scmp_filter_ctx ctx)
{
	const unsigned char *at = state.calls, *end = state.calls + state.matched;
	int failed = 0;

	if (is_recorded(ctx))
		state.invalid = 1;
	if (!is_compared(ctx))
		return 0;
	bpfcache_stop();
	while (at < end && !failed) {
		struct recorded_call call;
		struct scmp_arg_cmp args[MAX_ARGS];

		memcpy(&call, at, sizeof(call));
		at += sizeof(call);
		memcpy(args, at, call.args * sizeof(*args));
		at += call.args * sizeof(*args);
		if (call.kind == CALL_RULE)
			failed = __real_seccomp_rule_add_array(ctx, call.what, (int)call.value, call.args, args);
	}
	return failed;
}

// before_setting is called before a setting changes. Recordings have no settings after the first
// rule.
static int before_setting(scmp_filter_ctx ctx) { return state.has_rules ? fall_back(ctx) : 0; }

scmp_filter_ctx __real_seccomp_init(uint32_t action);

scmp_filter_ctx __wrap_seccomp_init(uint32_t action)
{
	scmp_filter_ctx ctx;

	if (state.mode == OFF)
		return __real_seccomp_init(action);
	if (state.filter && fall_back(state.filter) != 0)
		return NULL;
	ctx = __real_seccomp_init(action);
	if (ctx && state.mode != OFF && !state.filter) {
		state.filter = ctx;
		on_call(ctx, (struct recorded_call){.kind = CALL_INIT, .what = action});
	}
	return ctx;
}

int __real_seccomp_arch_add(scmp_filter_ctx ctx, uint32_t arch);

int __wrap_seccomp_arch_add(scmp_filter_ctx ctx, uint32_t arch)
{
	int rc = before_setting(ctx);

	if (rc == 0) {
		rc = __real_seccomp_arch_add(ctx, arch);
		on_call(ctx, (struct recorded_call){.kind = CALL_ARCH, .what = arch, .result = rc});
	}
	return rc;
}

int __real_seccomp_attr_set(scmp_filter_ctx ctx, enum scmp_filter_attr attr, uint32_t value);

int __wrap_seccomp_attr_set(scmp_filter_ctx ctx, enum scmp_filter_attr attr, uint32_t value)
{
	int rc = before_setting(ctx);

	if (rc == 0) {
		rc = __real_seccomp_attr_set(ctx, attr, value);
		on_call(ctx, (struct recorded_call){.kind = CALL_ATTR, .what = attr, .value = value, .result = rc});
	}
	return rc;
}

int __wrap_seccomp_rule_add_array(
	scmp_filter_ctx ctx, uint32_t action, int syscall, unsigned int n, const struct scmp_arg_cmp *args)
{
	struct {
		struct recorded_call call;
		struct scmp_arg_cmp args[MAX_ARGS];
	} rule = {.call = {.kind = CALL_RULE, .what = action, .value = (uint32_t)syscall, .args = n}};
	size_t size = sizeof(rule.call) + n * sizeof(*args);
	int rc;

	if (n > MAX_ARGS) {
		rc = fall_back(ctx);
		return rc ? rc : __real_seccomp_rule_add_array(ctx, action, syscall, n, args);
	}
	if (n > 0)
		memcpy(rule.args, args, n * sizeof(*args));
	if (is_compared(ctx)) {
		if (matches(&rule, size)) {
			state.has_rules = 1;
			return 0;
		}
		rc = fall_back(ctx);
		if (rc != 0)
			return rc;
	}
	rc = __real_seccomp_rule_add_array(ctx, action, syscall, n, args);
	if (is_recorded(ctx) && rc == 0) {
		state.has_rules = 1;
		append(&rule, size);
	} else if (is_recorded(ctx)) {
		state.invalid = 1;
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
		state.program = malloc((size_t)st.st_size);
		if (state.program && pread(fd, state.program, (size_t)st.st_size, 0) == st.st_size)
			state.program_size = (size_t)st.st_size;
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

	if (is_recorded(ctx)) {
		if (ctx && !state.invalid && !state.program)
			take_program(ctx);
		return -ECANCELED;
	}
	if (is_compared(ctx) && state.matched == state.size)
		return write_all(fd, state.program, state.program_size);
	rc = fall_back(ctx);
	return rc ? rc : __real_seccomp_export_bpf(ctx, fd);
}

int __real_seccomp_load(const scmp_filter_ctx ctx);

int __wrap_seccomp_load(const scmp_filter_ctx ctx)
{
	int rc = is_recorded(ctx) ? -ECANCELED : fall_back(ctx);

	return rc ? rc : __real_seccomp_load(ctx);
}

void __real_seccomp_release(scmp_filter_ctx ctx);

// A recorded filter is released only after bpfcache_result. Other threads may release earlier
// filters.
void __wrap_seccomp_release(scmp_filter_ctx ctx)
{
	if (is_compared(ctx))
		bpfcache_stop();
	__real_seccomp_release(ctx);
}

int __real_seccomp_merge(scmp_filter_ctx ctx, scmp_filter_ctx src);

int __wrap_seccomp_merge(scmp_filter_ctx ctx, scmp_filter_ctx src)
{
	int rc = fall_back(ctx);

	if (rc == 0)
		rc = fall_back(src);
	return rc ? rc : __real_seccomp_merge(ctx, src);
}

// PLAIN wraps a function whose calls are neither recorded nor compared.
#define PLAIN(name, params, args)                    \
	int __real_##name params;                    \
	int __wrap_##name params                     \
	{                                            \
		int rc = fall_back(ctx);             \
                                                     \
		return rc ? rc : __real_##name args; \
	}

PLAIN(seccomp_reset, (scmp_filter_ctx ctx, uint32_t action), (ctx, action))
PLAIN(seccomp_arch_remove, (scmp_filter_ctx ctx, uint32_t arch), (ctx, arch))
PLAIN(seccomp_syscall_priority, (scmp_filter_ctx ctx, int syscall, uint8_t priority), (ctx, syscall, priority))
PLAIN(seccomp_rule_add_exact_array,
	(scmp_filter_ctx ctx, uint32_t action, int syscall, unsigned int n, const struct scmp_arg_cmp *args),
	(ctx, action, syscall, n, args))
PLAIN(seccomp_export_pfc, (const scmp_filter_ctx ctx, int fd), (ctx, fd))

// Functions that libseccomp 2.6 added. A program built with it may run with an older library.
#if SCMP_VER_MAJOR > 2 || SCMP_VER_MINOR >= 6
#define NEWER(name, params, args)                                      \
	__attribute__((weak)) int __real_##name params;                \
	int __wrap_##name params                                       \
	{                                                              \
		int rc = __real_##name ? fall_back(ctx) : -EOPNOTSUPP; \
                                                                       \
		return rc ? rc : __real_##name args;                   \
	}

NEWER(seccomp_precompute, (const scmp_filter_ctx ctx), (ctx))
NEWER(seccomp_export_bpf_mem, (const scmp_filter_ctx ctx, void *buf, size_t *len), (ctx, buf, len))
NEWER(seccomp_transaction_start, (const scmp_filter_ctx ctx), (ctx))
NEWER(seccomp_transaction_commit, (const scmp_filter_ctx ctx), (ctx))

__attribute__((weak)) void __real_seccomp_transaction_reject(const scmp_filter_ctx ctx);

// The start of the transaction has ended the comparison already.
void __wrap_seccomp_transaction_reject(const scmp_filter_ctx ctx)
{
	if (__real_seccomp_transaction_reject)
		__real_seccomp_transaction_reject(ctx);
}
#endif
