// Package machine gives tests access to the processes, mounts, cgroups and files of the machine
// they run in.
package machine
