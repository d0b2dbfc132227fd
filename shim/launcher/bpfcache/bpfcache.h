// Wrappers of libseccomp's functions (the linker's --wrap). They record the calls that make a
// filter and the resulting program, or compare such calls with a recording. Other threads may use
// existing filters meanwhile, but must not create one.
#ifndef BERTH_BPFCACHE_H
#define BERTH_BPFCACHE_H

#include <stddef.h>
#include <stdint.h>

// A recording is a sequence of these in the machine's byte order: CALL_INIT, then settings, then
// rules.
struct recorded_call {
	uint32_t kind;   // CALL_...
	uint32_t what;   // the default action, the architecture, the attribute, the rule's action
	uint32_t value;  // the attribute's value, the rule's system call
	int32_t result;  // of the call
	uint32_t args;   // number of struct scmp_arg_cmp that follow; 0 except for rules
	uint32_t unused; // 0
};

enum { CALL_INIT = 1, CALL_ARCH, CALL_ATTR, CALL_RULE };

enum { MAX_ARGS = 6 }; // of a system call

// bpfcache_record starts to record the next filter. Functions that return its program fail with
// ECANCELED instead. Returns 0, or -1 if the wrappers are not linked: then nothing may be recorded.
int bpfcache_record(void);

// bpfcache_result returns the recording, valid until the next bpfcache_... call. program is NULL if
// the recording failed.
struct bpfcache_recording {
	const void *calls;
	size_t calls_size;
	const void *program;
	size_t program_size;
};
struct bpfcache_recording bpfcache_result(void);

// bpfcache_compare starts to compare the next filter with a recording, whose memory must stay
// valid. While the calls match, libseccomp gets no rules. If all match, the recorded program is
// exported. At the first difference libseccomp gets the withheld rules and all later calls.
void bpfcache_compare(struct bpfcache_recording recording);

// bpfcache_stop ends recording and comparison.
void bpfcache_stop(void);

#endif
