// Package subject is what the benchmark measures: a CRI runtime, with its daemon, its cgroup and its pods.
//
// A runtime that the benchmark starts itself (Daemon) has a cgroup of its own with two parts: the daemon with all that
// it starts, and its pods. What the whole has used of the CPU, also for processes that are gone, is one number of the
// kernel's. A runtime that runs already is reached over its socket alone: rows that need more are left empty.
package subject
