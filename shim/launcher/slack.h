#ifndef BERTH_SLACK_H
#define BERTH_SLACK_H

enum { SLACK = 2 * 1000 * 1000 }; // ns

// slack_restore restores the calling thread's timer slack of the process's start. Returns 0, or
// -1 with errno.
int slack_restore(void);

#endif
