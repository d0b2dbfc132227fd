#include "slack.h"

#include <stdlib.h>
#include <sys/prctl.h>

// What the process was started with, in nanoseconds; 0: nothing was changed.
static unsigned long before;

static void slacken(void)
{
	int now;

	// The first is set for libcontainer's init, the second for launchers (shim/proto: SlackEnv).
	if (!getenv("_LIBCONTAINER_INITPIPE") && !getenv("BERTH_TIMER_SLACK"))
		return;
	now = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
	if (now > 0 && now < SYSMON_SLACK && prctl(PR_SET_TIMERSLACK, SYSMON_SLACK, 0, 0, 0) == 0)
		before = (unsigned long)now;
}

// nsexec is libcontainer's, called by a constructor: before Go's runtime starts threads, which inherit the slack. It forks init, where it
// returns, and a process has for ever, as its default slack, what its parent had when it was forked (PR_SET_TIMERSLACK with 0 brings that
// back). So it is only then that the slack may change. Between constructors there is no order to rely on, hence the linker's --wrap.
void __real_nsexec(void);
void __wrap_nsexec(void);

void __wrap_nsexec(void)
{
	__real_nsexec();
	slacken();
}

int sysmon_slack_back(void) { return before ? prctl(PR_SET_TIMERSLACK, before, 0, 0, 0) : 0; }
