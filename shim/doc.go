// Package shim starts containers and watches over them.
//
// A container is launched by berth-shim, a process of its own that links
// libcontainer (package shim/launcher). The launcher then replaces itself by
// execve with the monitor (package main in shim/monitor): same pid, same
// children, a fraction of the memory. This package is the daemon's side: a
// Launcher pool that starts launchers ahead of need, and a Monitor handle for
// talking to a running monitor, whether this daemon started it or an earlier one.
//
// # Contract
//
// Everything a monitor knows is in the container's shim directory (Dir), so a
// new daemon needs nothing else:
//
//	Dir/shim   "<shim pid> <shim starttime> <init pid> <init starttime> <started, unix ns>\n", init
//	           fields 0 until the container's init exists; replaced by rename. It is there before the
//	           launcher gets its order, and goes when the launcher has undone a launch that failed
//	Dir/sock   the monitor's unix socket: attach, log reopen, resize, close stdin
//	Dir/oci    how to call the runtime that made the container, if that was a program (JSON)
//	Dir/exit   the exit record, written by rename when init has ended and its output
//	           is on disk; after it the monitor exits
//
// The end of a container is the end of its monitor process (pidfd): then Dir/exit
// either exists, or the shim was lost.
package shim
