// Package subject controls a measured CRI runtime: its daemon, its cgroup and its pods.
//
// The benchmark gives each runtime that it starts (Daemon) a cgroup with two parts: the daemon with
// its children, and the pods. The kernel's CPU time of that cgroup includes exited processes. A
// runtime that already runs is reached only through its socket, so rows that need more stay empty.
package subject
