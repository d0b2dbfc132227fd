// What is wrapped around libseccomp (the linker's --wrap): a recording of the calls that make a filter, with the program
// that came of them, or a comparison of such calls with a recording. Other threads may use libseccomp meanwhile, for other filters,
// as long as they do not make one.
#ifndef BERTH_FILTER_MEMO_H
#define BERTH_FILTER_MEMO_H

#include <stddef.h>
#include <stdint.h>

// A recording is a sequence of these, in the machine's byte order: MEMO_INIT, then settings, then rules.
struct memo_call {
	uint32_t kind;   // MEMO_...
	uint32_t what;   // the default action, the architecture, the attribute, the rule's action
	uint32_t value;  // the attribute's value, the rule's system call
	int32_t result;  // of the call
	uint32_t args;   // how many struct scmp_arg_cmp follow; only rules have any
	uint32_t unused; // 0
};

enum { MEMO_INIT = 1, MEMO_ARCH, MEMO_ATTR, MEMO_RULE };

enum { MEMO_MAX_ARGS = 6 }; // that a system call has

// memo_record begins to record the next filter that is made. Its program is recorded instead of being handed out: whoever
// wants it is told ECANCELED. Returns 0, or -1 if the wrappers are not linked: then nothing may be recorded.
int memo_record(void);

// memo_recording returns what is recorded until the next memo_... call. No program: something went wrong.
struct memo {
	const void *calls;
	size_t calls_size;
	const void *program;
	size_t program_size;
};
struct memo memo_recording(void);

// memo_compare begins to compare the next filter that is made with a recording, whose memory has to stay. As long as the calls agree its
// rules are kept from libseccomp, and whoever wants the program gets the recorded one if all do. At the first difference libseccomp gets
// the rules that were kept from it, and everything from then on.
void memo_compare(struct memo recording);

// memo_forget ends either.
void memo_forget(void);

#endif
