#include "slack.h"

#include <stdlib.h>
#include <sys/prctl.h>

// What the process was started with, in nanoseconds; 0: nothing was changed.
static unsigned long before;

// A constructor runs before Go's runtime starts threads, which inherit the slack. libcontainer's C code, a constructor too, forks init: what
// is remembered here is copied by that.
__attribute__((constructor)) static void slacken(void)
{
	int now;

	// The first is set for libcontainer's init, the second for launchers (shim/control: SlackEnv).
	if (!getenv("_LIBCONTAINER_INITPIPE") && !getenv("BERTH_TIMER_SLACK"))
		return;
	now = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
	if (now > 0 && now < SYSMON_SLACK && prctl(PR_SET_TIMERSLACK, SYSMON_SLACK, 0, 0, 0) == 0)
		before = (unsigned long)now;
}

int sysmon_slack_back(void)
{
	return before ? prctl(PR_SET_TIMERSLACK, before, 0, 0, 0) : 0;
}
