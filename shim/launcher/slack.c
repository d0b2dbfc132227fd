#include "slack.h"

#include <malloc.h>
#include <stdlib.h>
#include <sys/prctl.h>

// The slack before the change, in nanoseconds; 0: unchanged.
static unsigned long before;

static void slacken(void)
{
	int now;

	// libcontainer sets the first for init. The daemon sets the second for launchers
	// (proto.SlackEnv).
	if (!getenv("_LIBCONTAINER_INITPIPE") && !getenv("BERTH_TIMER_SLACK"))
		return;
	now = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
	if (now > 0 && now < SLACK && prctl(PR_SET_TIMERSLACK, SLACK, 0, 0, 0) == 0)
		before = (unsigned long)now;
}

// libcontainer calls nsexec in a constructor, before Go's runtime starts threads, which inherit the
// slack. nsexec forks init and returns in it. A process's default slack is its parent's slack at
// the fork, and never changes (PR_SET_TIMERSLACK with 0 restores it). So the slack may change only
// after nsexec. The order of constructors is undefined, hence the linker's --wrap.
void __real_nsexec(void);
void __wrap_nsexec(void);

void __wrap_nsexec(void)
{
	__real_nsexec();
#ifdef M_ARENA_MAX
	// Otherwise glibc maps and trims an arena for each thread of Go's runtime, which frees one
	// object.
	mallopt(M_ARENA_MAX, 1);
#endif
	slacken();
}

int slack_restore(void) { return before ? prctl(PR_SET_TIMERSLACK, before, 0, 0, 0) : 0; }
