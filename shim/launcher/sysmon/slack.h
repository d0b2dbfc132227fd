#ifndef BERTH_SYSMON_SLACK_H
#define BERTH_SYSMON_SLACK_H

enum { SYSMON_SLACK = 500 * 1000 }; // ns

// sysmon_slack_back gives the calling thread the timer slack that the process was started with. Returns 0, or -1 with errno.
int sysmon_slack_back(void);

#endif
