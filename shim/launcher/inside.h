#ifndef BERTH_INSIDE_H
#define BERTH_INSIDE_H

// The first argument of an init that starts in a cgroup: this and the cgroup's directory.
#define INSIDE "berth-init in "

#endif
