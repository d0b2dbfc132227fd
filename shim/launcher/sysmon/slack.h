#ifndef BERTH_SYSMON_SLACK_H
#define BERTH_SYSMON_SLACK_H

enum { SYSMON_SLACK = 500 * 1000 }; // ns

// sysmon_slack_back restores the calling thread's timer slack of the process's start. Returns 0, or
// -1 with errno.
int sysmon_slack_back(void);

#endif
